// The device as torch sees it: memory, current device, streams, random numbers. Memory is the host's, and work is done when
// the call returns, so streams and events have nothing to wait for.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <mutex>

namespace toy {

namespace {

thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < kCount,
      "toy:", static_cast<int>(index), " was asked for, but there are ", static_cast<int>(kCount),
      " toy devices. Choose an index from 0 to ", kCount - 1, ".");
  return index;
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? checked(device.index()) : current;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current;
    void* data = nullptr;
    if (bytes > 0) {
      reserve(device, bytes);
      data = c10::alloc_cpu(bytes);
    }
    return {data, new Block{this, data, bytes, device}, &release, c10::Device(kType, device)};
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto& bytes = bytes_[checked(device)];
    stats.allocated_bytes[all] = stats.active_bytes[all] = stats.reserved_bytes[all] = stats.requested_bytes[all] = bytes;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes_[checked(device)].reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes_[checked(device)].reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {kCapacity - static_cast<size_t>(bytes_[checked(device)].current), kCapacity};
  }

 private:
  struct Block {
    Allocator* allocator;
    void* data;
    size_t bytes;
    c10::DeviceIndex device;
  };

  void reserve(c10::DeviceIndex device, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto used = static_cast<size_t>(bytes_[device].current);
    TORCH_CHECK_WITH(
        OutOfMemoryError, bytes <= kCapacity - used,
        "toy:", static_cast<int>(device), " is out of memory: ", bytes, " bytes were asked for, ", used, " of ", kCapacity,
        " are in use. Free tensors, or use smaller batches.");
    bytes_[device].increase(bytes);
  }

  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    const std::lock_guard<std::mutex> lock(block->allocator->mutex_);
    block->allocator->bytes_[block->device].decrease(block->bytes);
    c10::free_cpu(block->data);
  }

  std::mutex mutex_;
  std::array<c10::CachingAllocator::Stat, kCount> bytes_;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return {kType, current};
  }
  void setDevice(c10::Device device) const override {
    set_device(index_of(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.has_index() ? device.index() : current;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kCount;
  }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Every device has a stream of random numbers of its own, which is that of a CPU generator.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index)
      : Generator(index, at::detail::createCPUGenerator()) {}

  Generator(c10::DeviceIndex index, at::Generator given)
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(given)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return host.get_offset();
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }

  mutable at::Generator host;

 private:
  Generator* clone_impl() const override {
    return new Generator(device().index(), host.clone());
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kCount;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto previous = current;
    set_device(index);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : checked(index));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace

c10::DeviceIndex current_device() noexcept {
  return current;
}

void set_device(c10::DeviceIndex index) {
  current = checked(index);
}

void register_allocator() {
  static Allocator allocator;
  c10::SetAllocator(kType, &allocator);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const std::array<at::Generator, kCount> generators{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return generators[index < 0 ? current : checked(index)];
}

const at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) {
    return tensor;
  }
  return at::from_blob(
      tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      tensor.options().device(c10::kCPU));
}

std::optional<at::Tensor> on_host(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional(on_host(*tensor)) : std::nullopt;
}

} // namespace toy
