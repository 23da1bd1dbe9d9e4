#include "comm/transport/transport.h"

#include <utility>

namespace dltrain::comm {

namespace {

class Several : public Request {
 public:
  explicit Several(std::vector<std::unique_ptr<Request>> requests) : requests_(std::move(requests)) {}
  void wait(Deadline deadline) override {
    for (auto& request : requests_) request->wait(deadline);
  }
  void abort() override {
    for (auto& request : requests_) request->abort();
  }

 private:
  std::vector<std::unique_ptr<Request>> requests_;
};

}  // namespace

std::unique_ptr<Request> Transport::exchange(const Place& place, const std::vector<Posting>& postings) {
  std::vector<std::unique_ptr<Request>> requests;
  for (const Posting& posting : postings) {
    requests.push_back(posting.sent ? send(place, posting.peer, posting.data, posting.bytes)
                                    : recv(place, posting.peer, posting.data, posting.bytes));
  }
  return std::make_unique<Several>(std::move(requests));
}

}  // namespace dltrain::comm
