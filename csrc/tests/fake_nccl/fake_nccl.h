#pragma once

// What the tests ask of the fake NCCL beyond NCCL's own functions; from any thread.

#include <string>
#include <vector>

namespace dltrain::fake_nccl {

struct Controls {
  // Forgets all that was asked for below, and the calls. Whoever waits in NCCL is told of a remote error.
  void (*reset)();
  // "rank 2: ncclSend peer 1 bytes 400"; rank -1 where a call names no communicator.
  std::vector<std::string> (*calls)();
  // Communicators that have been neither refused nor aborted.
  int (*open)();
  // Whether it works on this build's streams; else on the CPU alone.
  bool (*takes_streams)();

  void (*set_version)(int version);
  // The n-th next call of this rank (-1: of any) has this result, and does nothing.
  void (*fail)(const char* function, int rank, int n, int result);
  // How many communicators there were to set it on.
  int (*set_error)(int rank, int result);
  // This rank is not initialised, nor are those that wait for it, until they are let go.
  void (*hold_back)(int rank);
  void (*let_go)();
  // Aborting a communicator is a remote error to the others. Else they hang.
  void (*tell_of_aborts)();
  // A send is over when its bytes are in a buffer, as over a network: an abort loses them, which finalizing does not.
  void (*buffer_sends)();
  // Whether a captured graph lives, which keeps whoever destroys or aborts a communicator.
  void (*let_a_graph_live)(bool lives);
};

// The one function that is looked up.
inline constexpr const char* controls = "fake_nccl_controls";
using GetControls = const Controls* (*)();

}  // namespace dltrain::fake_nccl
