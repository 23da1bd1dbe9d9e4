#pragma once

// Controls of the fake NCCL for tests, in addition to NCCL's own functions; may be called by any thread.

#include <string>
#include <vector>

namespace dltrain::fake_nccl {

struct Controls {
  // Resets all settings below, and the recorded calls. Threads that wait in NCCL get a remote error.
  void (*reset)();
  // Recorded calls, such as "rank 2: ncclSend peer 1 bytes 400"; the rank is -1 if a call has no communicator.
  std::vector<std::string> (*calls)();
  // Communicators that have been neither destroyed nor aborted.
  int (*open)();
  // Whether it works on streams of this build; otherwise only on the CPU.
  bool (*takes_streams)();

  void (*set_version)(int version);
  // The n-th next call of this rank (-1: of any rank) returns this result, and does nothing.
  void (*fail)(const char* function, int rank, int n, int result);
  // Sets the error of the rank's communicators; returns how many there were.
  int (*set_error)(int rank, int result);
  // Holds back the initialization of this rank, and so of the ranks that wait for it, until let_go().
  void (*hold_back)(int rank);
  void (*let_go)();
  // Aborting a communicator is a remote error to the other ranks. Otherwise they hang.
  void (*tell_of_aborts)();
  // A send is complete when its bytes are buffered, as over a network: an abort loses them, but finalizing does not.
  void (*buffer_sends)();
  // Whether a captured graph is alive, which blocks destroying or aborting a communicator.
  void (*let_a_graph_live)(bool lives);
};

// The only function that is looked up.
inline constexpr const char* controls = "fake_nccl_controls";
using GetControls = const Controls* (*)();

}  // namespace dltrain::fake_nccl
