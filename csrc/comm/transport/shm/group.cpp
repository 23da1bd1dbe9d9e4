#include "comm/transport/shm/group.h"

#include <algorithm>
#include <random>

#include "comm/transport/transport.h"
#include "core/check.h"

namespace dltrain::comm::shm {

struct alignas(2 * cache_line) Group::Label {
  static constexpr uint64_t known = 0x316d68732d746c64;  // "dlt-shm1": changes with the layout of the memory
  uint64_t kind;
  uint64_t secret;
};

namespace {

constexpr int64_t label_bytes = int64_t{2} * cache_line;
constexpr int64_t least = 16 << 10, most = 256 << 10;  // bytes of a ring
constexpr int64_t of_a_rank = 1 << 20;                 // bytes of the rings of a rank, if these have not the least size

int64_t whole_pages(int64_t bytes) { return (bytes + page_size() - 1) / page_size() * page_size(); }

int64_t ring_bytes(int world_size) { return whole_pages(std::clamp(of_a_rank / std::max(1, world_size - 1), least, most)); }

int64_t streams(int world_size) { return static_cast<int64_t>(world_size) * (world_size - 1); }

int64_t number(int world_size, int from, int to) { return static_cast<int64_t>(from) * (world_size - 1) + to - (to > from ? 1 : 0); }

// Where the positions and the rings begin, and the end of all; in bytes.
int64_t first_positions(int world_size) { return label_bytes + static_cast<int64_t>(sizeof(Group::Member)) * world_size; }

int64_t first_ring(int world_size) {
  return whole_pages(first_positions(world_size) + static_cast<int64_t>(sizeof(Positions)) * streams(world_size));
}

int64_t group_bytes(int world_size) { return first_ring(world_size) + ring_bytes(world_size) * streams(world_size); }

uint64_t random_number() {
  std::random_device source;
  return (static_cast<uint64_t>(source()) << 32) | source();
}

}  // namespace

Group::Group(int world_size) : world_size_(world_size), memory_(group_bytes(world_size)) { label() = {Label::known, random_number()}; }

// An address is that of the memory, a space, and the secret.
Group::Group(const std::string& address, int world_size)
    : world_size_(world_size), memory_(address.substr(0, address.find(' ')), group_bytes(world_size)) {
  if (label().kind != Label::known || text(label().secret) != address.substr(address.find(' ') + 1))
    throw TransportError(text(address, ": expected the memory of rank 0, got another one"));
}

std::string Group::address() const { return text(memory_.address(), " ", label().secret); }

Group::Label& Group::label() const {
  static_assert(sizeof(Label) == label_bytes);
  return *reinterpret_cast<Label*>(memory_.data());
}

Group::Member& Group::member(int rank) const { return reinterpret_cast<Member*>(memory_.data() + label_bytes)[rank]; }

Positions& Group::positions(int from, int to) const {
  return reinterpret_cast<Positions*>(memory_.data() + first_positions(world_size_))[number(world_size_, from, to)];
}

Ring Group::ring(int from, int to) const {
  const int64_t size = ring_bytes(world_size_);
  return {memory_, first_ring(world_size_) + number(world_size_, from, to) * size, size};
}

}  // namespace dltrain::comm::shm
