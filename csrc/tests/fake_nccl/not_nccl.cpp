// A library that has no more of NCCL than its version.

extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}
