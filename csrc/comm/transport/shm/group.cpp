#include "comm/transport/shm/group.h"

#include <algorithm>
#include <random>

#include "comm/transport/transport.h"
#include "core/check.h"

namespace dltrain::comm::shm {

struct alignas(Stream::alignment) Group::Label {
  static constexpr uint64_t known = 0x316d68732d746c64;  // "dlt-shm1": changes with the layout of the memory
  uint64_t kind;
  uint64_t secret;
};

namespace {

constexpr int64_t least = 16 << 10, most = 256 << 10;  // bytes of a stream
constexpr int64_t of_a_rank = 1 << 20;                 // bytes of the streams of a rank, if these have not the least size
constexpr int64_t step = Stream::parts * Stream::alignment;

int64_t capacity_of(int world_size) { return std::clamp(of_a_rank / std::max(1, world_size - 1) / step * step, least, most); }

int64_t header_bytes(int world_size, int64_t label) { return label + static_cast<int64_t>(sizeof(Group::Member)) * world_size; }

int64_t group_bytes(int world_size, int64_t label) {
  return header_bytes(world_size, label) + Stream::bytes(capacity_of(world_size)) * world_size * (world_size - 1);
}

uint64_t random_number() {
  std::random_device source;
  return (static_cast<uint64_t>(source()) << 32) | source();
}

}  // namespace

Group::Group(int world_size)
    : world_size_(world_size), capacity_(capacity_of(world_size)), memory_(group_bytes(world_size, sizeof(Label))) {
  label() = {Label::known, random_number()};
}

// An address is that of the memory, a space, and the secret.
Group::Group(const std::string& address, int world_size)
    : world_size_(world_size),
      capacity_(capacity_of(world_size)),
      memory_(address.substr(0, address.find(' ')), group_bytes(world_size, sizeof(Label))) {
  if (label().kind != Label::known || text(label().secret) != address.substr(address.find(' ') + 1))
    throw TransportError(text(address, ": expected the memory of rank 0, got another one"));
}

std::string Group::address() const { return text(memory_.address(), " ", label().secret); }

Group::Label& Group::label() const { return *reinterpret_cast<Label*>(memory_.data()); }

Group::Member& Group::member(int rank) const { return reinterpret_cast<Member*>(memory_.data() + sizeof(Label))[rank]; }

std::byte* Group::stream(int from, int to) const {
  const int64_t number = static_cast<int64_t>(from) * (world_size_ - 1) + to - (to > from);
  return memory_.data() + header_bytes(world_size_, sizeof(Label)) + number * Stream::bytes(capacity_);
}

}  // namespace dltrain::comm::shm
