// A caching allocator with the rules of CUDA's: what is freed may be used again by the stream on which it was allocated, because
// that one works in order; any other stream that uses it has to say so. Who forgets that finds kPoison in his results, once the memory is given away again.
#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <cstring>
#include <set>

namespace toy {

namespace {

constexpr int kPoison = 0xCB; // as a float it is about -2.7e7, as an index far outside
constexpr size_t kGrain = 512;

struct Block {
  void* data;
  size_t asked;
  size_t bytes;
  Stream home;
  std::set<Stream> users;
};

struct Leaving {
  std::unique_ptr<Block> block;
  std::vector<Place> places;
};

class Memory {
 public:
  static Memory& the() {
    static auto* memory = new Memory; // never destroyed: tensors may be freed to the last
    return *memory;
  }

  c10::DataPtr allocate(size_t asked, c10::DeviceIndex device) {
    const c10::Device place(kType, device);
    if (asked == 0) {
      return {nullptr, nullptr, &free, place};
    }
    check_not_forked();
    auto home = current_queue(device);
    const auto bytes = (asked + kGrain - 1) / kGrain * kGrain;
    void* data = cached(home, bytes);
    if (data == nullptr) {
      make_room(device, bytes);
      data = c10::alloc_cpu(bytes);
      std::memset(data, kPoison, bytes);
    }
    auto* block = new Block{data, asked, bytes, std::move(home), {}};
    const std::lock_guard lock(mutex_);
    blocks_.insert(block);
    allocated_[device].increase(asked);
    return {data, block, &free, place};
  }

  void record(const c10::DataPtr& memory, const c10::Stream& stream) {
    auto* block = static_cast<Block*>(memory.get_context());
    const std::lock_guard lock(mutex_);
    if (blocks_.count(block) == 0) {
      return; // empty, or not of this allocator
    }
    auto user = queue_of(stream);
    if (user != block->home) {
      block->users.insert(std::move(user));
    }
  }

  void empty_cache() {
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
      empty_cache(device);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats statistics(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[all] = stats.active_bytes[all] = stats.requested_bytes[all] = allocated_[checked(device)];
    stats.reserved_bytes[all] = reserved_[device];
    return stats;
  }

  void reset(c10::DeviceIndex device, void (c10::CachingAllocator::Stat::*what)()) {
    const std::lock_guard lock(mutex_);
    (allocated_[checked(device)].*what)();
    (reserved_[device].*what)();
  }

  std::pair<size_t, size_t> information(c10::DeviceIndex device) {
    const std::lock_guard lock(mutex_);
    return {kCapacity - static_cast<size_t>(reserved_[checked(device)].current), kCapacity};
  }

 private:
  static void free(void* context) {
    if (context != nullptr && !forked()) { // a child that was forked may find the lock taken by a thread it has not
      the().leave(std::unique_ptr<Block>(static_cast<Block*>(context)));
    }
  }

  void leave(std::unique_ptr<Block> block) {
    const std::lock_guard lock(mutex_);
    blocks_.erase(block.get());
    allocated_[block->home->device].decrease(block->asked);
    if (block->users.empty()) {
      keep(*block);
      return;
    }
    std::vector<Place> places;
    for (const auto& user : block->users) {
      places.push_back(user->mark());
    }
    leaving_.push_back({std::move(block), std::move(places)});
  }

  // Its stream may use the memory from here on.
  void keep(const Block& block) {
    cache_[block.home][block.bytes].push_back(block.data);
  }

  void keep_what_has_left() {
    std::erase_if(leaving_, [this](const Leaving& one) {
      for (const auto& place : one.places) {
        if (!place->reached()) {
          return false;
        }
      }
      keep(*one.block);
      return true;
    });
  }

  void* cached(const Stream& home, size_t bytes) {
    const std::lock_guard lock(mutex_);
    keep_what_has_left();
    auto& found = cache_[home][bytes];
    if (found.empty()) {
      return nullptr;
    }
    void* data = found.back();
    found.pop_back();
    // Poisoned when it is given away, not when it is freed: until then another stream may read it, if the home waits for that
    // one before it takes the memory again. FSDP frees gradients in this way, and it is right on CUDA.
    home->add([data, bytes] { std::memset(data, kPoison, bytes); }, Queue::Full::kIgnore);
    return data;
  }

  void make_room(c10::DeviceIndex device, size_t bytes) {
    if (!reserve(device, bytes)) {
      empty_cache(device);
      TORCH_CHECK_WITH(
          OutOfMemoryError, reserve(device, bytes),
          "toy:", static_cast<int>(device), " is out of memory: ", bytes, " bytes were asked for, ",
          reserved_[device].current, " of ", kCapacity, " are in use. Free tensors, or use smaller batches.");
    }
  }

  bool reserve(c10::DeviceIndex device, size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > kCapacity - static_cast<size_t>(reserved_[device].current)) {
      return false;
    }
    reserved_[device].increase(bytes);
    return true;
  }

  void empty_cache(c10::DeviceIndex device) {
    {
      const std::lock_guard lock(mutex_);
      if (static_cast<size_t>(reserved_[device].current) == held(device)) {
        return;
      }
    }
    wait_for_device(device, "empty_cache"); // kernels that are queued may use what is in it
    const std::lock_guard lock(mutex_);
    keep_what_has_left();
    for (auto& [home, sizes] : cache_) {
      if (home->device != device) {
        continue;
      }
      for (auto& [bytes, blocks] : sizes) {
        for (void* data : blocks) {
          c10::free_cpu(data);
          reserved_[device].decrease(bytes);
        }
        blocks.clear();
      }
    }
  }

  size_t held(c10::DeviceIndex device) const {
    size_t bytes = 0;
    for (const auto* block : blocks_) {
      bytes += block->home->device == device ? block->bytes : 0;
    }
    return bytes;
  }

  std::mutex mutex_;
  std::set<const Block*> blocks_;
  std::map<Stream, std::map<size_t, std::vector<void*>>> cache_;
  std::vector<Leaving> leaving_;
  std::array<c10::CachingAllocator::Stat, kMost> allocated_;
  std::array<c10::CachingAllocator::Stat, kMost> reserved_;
};

// The two kinds of allocators that torch knows have one base each, and the same memory here.
template <typename Base>
class Allocating : public Base {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return Memory::the().allocate(bytes, current_device());
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    current_queue(current_device())->add([=] { std::memcpy(target, source, bytes); });
  }
};

class Allocator final : public Allocating<c10::DeviceAllocator> {
 public:
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    Memory::the().empty_cache();
  }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_stream(memory, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return Memory::the().statistics(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Memory::the().reset(device, &c10::CachingAllocator::Stat::reset_accumulated);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Memory::the().reset(device, &c10::CachingAllocator::Stat::reset_peak);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return Memory::the().information(device);
  }
};

// Host memory that the device reads and writes by itself, so late. It is not used again before the device has passed.
class Pinned final : public c10::Allocator {
 public:
  static Pinned& the() {
    static auto* pinned = new Pinned;
    return *pinned;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device host(c10::kCPU);
    if (bytes == 0) {
      return {nullptr, nullptr, &free, host};
    }
    const std::lock_guard lock(mutex_);
    std::erase_if(leaving_, [](const auto& one) { return gone(one.first, one.second); });
    void* data = c10::alloc_cpu(bytes);
    blocks_[data] = {bytes, {}};
    return {data, data, &free, host};
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool holds(const void* data) {
    const std::lock_guard lock(mutex_);
    return find(data) != blocks_.end();
  }

  void use(const void* data, const Place& until) {
    const std::lock_guard lock(mutex_);
    auto found = find(data);
    if (found != blocks_.end()) {
      found->second.places.push_back(until);
    }
  }

 private:
  struct Area {
    size_t bytes = 0;
    std::vector<Place> places;
  };
  using Blocks = std::map<const void*, Area>;

  static void free(void* data) {
    if (data == nullptr || forked()) {
      return;
    }
    auto& self = the();
    const std::lock_guard lock(self.mutex_);
    auto area = std::move(self.blocks_.extract(data).mapped());
    if (!gone(data, area)) {
      self.leaving_.emplace_back(data, std::move(area));
    }
  }

  static bool gone(void* data, const Area& area) {
    for (const auto& place : area.places) {
      if (!place->reached()) {
        return false;
      }
    }
    std::memset(data, kPoison, area.bytes);
    c10::free_cpu(data);
    return true;
  }

  Blocks::iterator find(const void* data) {
    auto after = blocks_.upper_bound(data);
    if (after == blocks_.begin()) {
      return blocks_.end();
    }
    const auto found = std::prev(after);
    const auto* begin = static_cast<const char*>(found->first);
    return static_cast<const char*>(data) < begin + found->second.bytes ? found : blocks_.end();
  }

  std::mutex mutex_;
  Blocks blocks_;
  std::vector<std::pair<void*, Area>> leaving_;
};

} // namespace

void register_allocator() {
  if (limits().statistics) {
    c10::SetAllocator(kType, new Allocator);
  } else {
    c10::SetAllocator(kType, new Allocating<c10::Allocator>);
  }
}

void record_stream(const c10::DataPtr& memory, const c10::Stream& stream) {
  Memory::the().record(memory, stream);
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize a storage of a toy device that is not resizable.");
  const auto device = storage.device().index();
  auto memory = Memory::the().allocate(bytes, device);
  const auto kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    current_queue(device)->add(
        [target = memory.get(), source = storage.data(), kept] { std::memcpy(target, source, kept); });
  }
  storage.set_data_ptr_noswap(std::move(memory)); // what was there is used again after the copy
  storage.set_nbytes(bytes);
}

c10::Allocator* pinned_allocator() {
  return &Pinned::the();
}

bool is_pinned(const void* data) {
  return Pinned::the().holds(data);
}

void use_pinned(const void* data, const Place& until) {
  Pinned::the().use(data, until);
}

} // namespace toy
