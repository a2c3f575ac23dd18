// All-reduce between the processes of one machine by reading each other's memory.
//
// Added by hvdkit (hvdkit/install/transfers.py); no part of Horovod's release.
//
// Gloo moves every byte through a TCP socket, also between two processes of one machine: a copy
// into the kernel, one out of it, and their bookkeeping, on cores that the training step needs.
// process_vm_readv copies once, from the peer's memory to where it is wanted. Rank r reduces the
// r-th part of the tensor, reading that part from all others, and then reads the reduced parts of
// these. Gloo's sockets keep the ranks in step, so a rank that dies is noticed as before.
//
// Nobody writes to another's memory: a rank that a failed operation left behind can do no harm. What it
// reads there afterwards it drops, since a number that stood there for the operation is gone (Stay).
//
// Source: reduce-scatter and all-gather as in Rabenseifner, "Optimization of Collective Reduction
// Operations", ICCS 2004; man 2 process_vm_readv.

#ifndef HOROVOD_PEER_MEMORY_H
#define HOROVOD_PEER_MEMORY_H

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __linux__
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

#include "gloo/allgather.h"
#include "gloo/barrier.h"
#include "gloo/common/error.h"
#include "gloo/context.h"
#include "gloo/transport/unbound_buffer.h"

#include "../logging.h"
#include "../utils/env_parser.h"

namespace horovod {
namespace common {
namespace peer_memory {

// With less the three meetings of the ranks cost more than they save.
constexpr size_t kSmallestBytes = 256 * 1024;
// What is read at a time stays in a core's cache until it is added up.
constexpr size_t kChunkBytes = 128 * 1024;

// One rank's part in an operation, as the others see it.
struct Place {
  int64_t pid;
  uint64_t input;
  uint64_t output;
  uint64_t usable;
  uint64_t stay;   // address of what follows
  uint64_t number; // there as long as `input` and `output` are the operation's
};

// A number that stays where it is until the operation ends, by an exception too. A peer that was
// stopped while the others gave up would otherwise read what this rank's memory holds since then.
class Stay {
public:
  Stay() : number_(Next()) {}
  ~Stay() { number_ = 0; }
  uint64_t Number() const { return number_; }
  uint64_t Address() const { return reinterpret_cast<uint64_t>(&number_); }

private:
  static uint64_t Next() {
    static std::atomic<uint64_t> next{uint64_t{std::random_device()()} << 32};
    return ++next;
  }

  std::atomic<uint64_t> number_;
};

inline std::vector<Place> Gather(const std::shared_ptr<gloo::Context>& ctx,
                                 Place& mine) {
  std::vector<Place> all(ctx->size);
  gloo::AllgatherOptions options(ctx);
  options.setInput(reinterpret_cast<char*>(&mine), sizeof(Place));
  options.setOutput(reinterpret_cast<char*>(all.data()),
                    sizeof(Place) * all.size());
  gloo::allgather(options);
  return all;
}

inline bool AllUsable(const std::vector<Place>& places) {
  return std::all_of(places.begin(), places.end(),
                     [](const Place& place) { return place.usable != 0; });
}

// Returns whether all of the bytes could be read.
inline bool Read(int64_t pid, uint64_t address, void* into, size_t bytes) {
#ifdef __linux__
  auto destination = static_cast<char*>(into);
  while (bytes > 0) {
    iovec local{destination, bytes};
    iovec remote{reinterpret_cast<void*>(address), bytes};
    auto count =
        process_vm_readv(static_cast<pid_t>(pid), &local, 1, &remote, 1, 0);
    if (count <= 0) {
      return false;
    }
    destination += count;
    address += count;
    bytes -= count;
  }
  return true;
#else
  return false;
#endif
}

inline int64_t Self() {
#ifdef __linux__
  return getpid();
#else
  return 0;
#endif
}

// Whether this process's memory can be read in this way: that of some devices cannot.
inline bool Readable(const void* data, size_t bytes) {
  char byte;
  auto first = reinterpret_cast<uint64_t>(data);
  return Read(Self(), first, &byte, 1) &&
         Read(Self(), first + bytes - 1, &byte, 1);
}

// Whether the rank is in the operation still: what was read before is what it had to give.
inline bool Stays(const Place& place) {
  uint64_t found = 0;
  std::atomic_thread_fence(std::memory_order_acquire);
  return Read(place.pid, place.stay, &found, sizeof(found)) &&
         found == place.number;
}

// Whether every rank reads a random number in every other's memory: not when they run on several
// machines, in containers of their own, or where the system forbids it.
inline bool Probe(const std::shared_ptr<gloo::Context>& ctx) {
  const bool wanted = !GetBoolEnvOrDefault("HOROVOD_SOCKETS_ONLY", false);
#ifdef __linux__
  if (wanted) {
    // Yama's ptrace_scope 1 lets others read only with this process's consent.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  }
#endif
  Stay stay;
  Place mine{Self(), 0, 0, wanted, stay.Address(), stay.Number()};
  auto places = Gather(ctx, mine);
  bool reached = AllUsable(places);
  for (auto& place : places) {
    reached = reached && Stays(place);
  }
  // The second meeting also keeps the number alive until all have read it.
  mine.usable = reached;
  return AllUsable(Gather(ctx, mine));
}

inline bool Connected(const std::shared_ptr<gloo::Context>& ctx) {
  using Contexts = std::map<std::weak_ptr<gloo::Context>, bool,
                            std::owner_less<std::weak_ptr<gloo::Context>>>;
  // Horovod's libraries for PyTorch and for TensorFlow have a background thread each, but share
  // what is static here when one process loads both.
  static thread_local Contexts known;
  auto found = known.find(ctx);
  if (found == known.end()) {
    found = known.emplace(ctx, Probe(ctx)).first;
    LOG(INFO, ctx->rank) << "Large tensors are reduced through "
                         << (found->second ? "the peers' memory" : "sockets");
  }
  return found->second;
}

inline void Require(bool was_read) {
  if (!was_read) {
    throw std::runtime_error(
        errno == ESRCH
            ? std::string("another rank ended while its memory was read")
            : std::string("cannot read another rank's memory any more: ") +
                  std::strerror(errno) +
                  "; HOROVOD_SOCKETS_ONLY=1 does without reading it");
  }
}

inline void RequireStay(const Place& place) {
  if (!Stays(place)) {
    throw std::runtime_error(
        "another rank ended or gave up while its memory was read");
  }
}

// Closes the connections to all ranks, as Gloo does when a wait of its own takes too long: those that
// wait for this one are told now, and not by a timeout.
inline void Leave(const std::shared_ptr<gloo::Context>& ctx) {
  try {
    auto nothing = ctx->createUnboundBuffer(nullptr, 0);
    nothing->waitRecv(std::chrono::milliseconds(1));
  } catch (const gloo::Exception&) {
  }
}

// Reduces `input` over the ranks into `output`, which may be the same; returns false on every rank,
// with nothing done, where that is not possible. Every rank of `ctx` must call.
//
//   prepare(in, out, n): brings n local elements into the sum's scale
//   add(sum, sum, values, n): adds, or takes the minimum, the product...
//   finish(sum, n): from the sum's scale to the result's
template <typename Prepare, typename Add, typename Finish>
bool Allreduce(const std::shared_ptr<gloo::Context>& ctx, const void* input,
               void* output, size_t elements, size_t element_bytes,
               Prepare prepare, Add add, Finish finish) {
  const size_t bytes = elements * element_bytes;
  if (ctx->size < 2 || bytes < kSmallestBytes || !Connected(ctx)) {
    return false;
  }
  Stay stay;
  Place mine{Self(),
             reinterpret_cast<uint64_t>(input),
             reinterpret_cast<uint64_t>(output),
             Readable(input, bytes) && Readable(output, bytes),
             stay.Address(),
             stay.Number()};
  auto places = Gather(ctx, mine);
  if (!AllUsable(places)) {
    return false;
  }
  // The r-th part begins here.
  auto begin = [&](int rank) {
    return element_bytes * (elements * rank / ctx->size);
  };
  auto meet = [&] {
    gloo::BarrierOptions options(ctx);
    gloo::barrier(options);
  };
  static thread_local std::vector<char> chunk(kChunkBytes);

  // `prepare` and `finish` fail on all ranks alike: their exceptions leave the connections open.
  auto together = [&](auto&& step) {
    try {
      step();
    } catch (...) {
      Leave(ctx);
      throw;
    }
  };
  auto read = [&](const Place& peer, uint64_t address, void* into, size_t size) {
    together([&] { Require(Read(peer.pid, address, into, size)); });
  };
  auto meet_after_reading = [&] {
    together([&] {
      for (int step = 1; step < ctx->size; ++step) {
        RequireStay(places[(ctx->rank + step) % ctx->size]);
      }
      meet();
    });
  };

  auto in = static_cast<const char*>(input);
  auto out = static_cast<char*>(output);
  const size_t last = begin(ctx->rank + 1);
  for (size_t at = begin(ctx->rank); at < last; at += kChunkBytes) {
    const size_t size = std::min(kChunkBytes, last - at);
    const size_t count = size / element_bytes;
    prepare(in + at, out + at, count);
    for (int step = 1; step < ctx->size; ++step) {
      auto& peer = places[(ctx->rank + step) % ctx->size];
      read(peer, peer.input + at, chunk.data(), size);
      prepare(chunk.data(), chunk.data(), count);
      add(out + at, out + at, chunk.data(), count);
    }
    finish(out + at, count);
  }
  meet_after_reading(); // every part is reduced
  for (int step = 1; step < ctx->size; ++step) {
    int rank = (ctx->rank + step) % ctx->size;
    auto& peer = places[rank];
    read(peer, peer.output + begin(rank), out + begin(rank),
         begin(rank + 1) - begin(rank));
  }
  meet_after_reading(); // nobody reads here any more
  return true;
}

} // namespace peer_memory
} // namespace common
} // namespace horovod

#endif // HOROVOD_PEER_MEMORY_H
