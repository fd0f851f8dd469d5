// Memory that belongs to streams, as in a caching allocator for GPUs.
//
// A block belongs to the stream on which it was allocated. When it is freed, it is at once free for the next allocation
// on that stream, whose work is queued behind all that used it there. If it was recorded on other streams
// (`record_stream`), it is free again only after their work up to this moment. The next allocation on its stream, of
// whatever size, overwrites it with 0xFF (NaN, -1 or 255) in the order of that stream, as another owner would: work on
// another stream that still needs it, and that nobody recorded, reads these values. Not earlier: a stream may wait for
// another one between freeing and allocating, and programs such as FSDP2 rely on that.
#pragma once
#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <unordered_map>

#include "queues.h"

namespace testdev {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int POISON = 0xFF;
inline c10::Device here() { return c10::Device(TYPE, 0); }

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? take(round_up(bytes)) : nullptr;
    return {data, data, &Memory::release, here()};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Memory::release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    device().launch(current_stream, "copy_data", 2 * bytes, [=] { std::memcpy(to, from, bytes); });
  }

  void record_use(void* data, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data);
    if (found != live_.end() && found->second.stream != stream) found->second.users.insert(stream);
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
    StreamId stream;
    std::set<StreamId> users;
    std::vector<MarkPtr> awaited;
  };

  static size_t round_up(size_t bytes) { return (bytes + 511) / 512 * 512; }
  static void release(void* data);

  void* take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    overwrite(current_stream);
    auto& free = free_[{current_stream, bytes}];
    void* data = nullptr;
    if (free.empty()) {
      TORCH_CHECK(posix_memalign(&data, 64, bytes) == 0, "testdev: out of memory for ", bytes, " bytes");
      std::memset(data, POISON, bytes);
    } else {
      data = free.back();
      free.pop_back();
    }
    live_[data] = Block{data, bytes, current_stream, {}, {}};
    return data;
  }

  void give_back(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data);
    if (found == live_.end()) return;
    Block block = std::move(found->second);
    live_.erase(found);
    for (auto user : block.users) block.awaited.push_back(device().record_quietly(user));
    (block.awaited.empty() ? freed_[block.stream] : held_).push_back(std::move(block));
  }

  // Blocks whose other streams have come past the moment of freeing.
  void reclaim() {
    auto passed = [](const Block& block) {
      return std::all_of(block.awaited.begin(), block.awaited.end(), [](const MarkPtr& mark) { return mark->done.load(); });
    };
    auto first = std::stable_partition(held_.begin(), held_.end(), [&](const Block& block) { return !passed(block); });
    for (auto block = first; block != held_.end(); ++block) freed_[block->stream].push_back(*block);
    held_.erase(first, held_.end());
  }

  // Runs nothing now, whatever the schedule: the lock is held.
  void overwrite(StreamId stream) {
    for (auto& block : freed_[stream]) {
      Task poison;
      poison.run = [data = block.data, bytes = block.bytes](Time start) {
        std::memset(data, POISON, bytes);
        device().counters.poisoned++;
        return start;
      };
      device().push(stream, {std::move(poison)}, false);
      free_[{stream, block.bytes}].push_back(block.data);
    }
    freed_[stream].clear();
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> live_;
  std::vector<Block> held_;                      // freed, and other streams may still use them
  std::map<StreamId, std::vector<Block>> freed_;  // until the next allocation on their stream
  std::map<std::pair<StreamId, size_t>, std::vector<void*>> free_;
};

// Host memory that `pin_memory()` gives. It is ordinary memory of which it is known that it was asked for so.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 64)) == 0, "testdev: out of pinned memory");
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[data] = bytes;
    return {data, data, &PinnedMemory::release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = sizes_.upper_bound(const_cast<void*>(data));
    if (after == sizes_.begin()) return false;
    auto& [start, bytes] = *std::prev(after);
    return static_cast<const char*>(data) < static_cast<char*>(start) + std::max<size_t>(bytes, 1);
  }

 private:
  static void release(void* data);
  std::mutex mutex_;
  std::map<void*, size_t> sizes_;
};

inline PinnedMemory& pinned_memory() {
  static auto* only = new PinnedMemory;
  return *only;
}

inline void PinnedMemory::release(void* data) {
  {
    std::lock_guard<std::mutex> lock(pinned_memory().mutex_);
    pinned_memory().sizes_.erase(data);
  }
  std::free(data);
}

inline Memory& memory() {
  static auto* only = new Memory;
  return *only;
}

inline void Memory::release(void* data) {
  if (data) memory().give_back(data);
}

}  // namespace testdev
