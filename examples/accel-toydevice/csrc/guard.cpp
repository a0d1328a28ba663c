// What torch asks of a device by way of its guard (devices, streams, events) and its hooks (generators, pinned memory).
#include "memory.h"
#include "random.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace toy {

namespace {

// An event stands for the place at which it was recorded last.
struct Event {
  Place place;
  c10::DeviceIndex device;
};

Event* event_of(void* event) {
  return static_cast<Event*>(event);
}

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
    return {kType, current_device()};
  }
  void setDevice(c10::Device device) const override {
    set_device(index_of(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      set_device_unchecked(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(*current_queue(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return pooled_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return pooled_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream)->idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for(queue_of(stream), "synchronize stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device(device, "synchronize device");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    const auto queue = queue_of(stream);
    *event_of(*event) = {queue->mark(), queue->device};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      queue_of(stream)->follow(event_of(event)->place);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || event_of(event)->place->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait_for(event_of(event)->place, event_of(event)->device, "synchronize event");
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete event_of(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto& begin = event_of(first)->place;
    const auto& end = event_of(second)->place;
    TORCH_CHECK(begin->reached() && end->reached(), "Both events must have been reached. Synchronize them first.");
    return std::chrono::duration<double, std::milli>(end->when() - begin->when()).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto previous = current_device();
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
    return new_generator(index);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool kHooked = [] {
  static auto* hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
  return true;
}();

} // namespace

} // namespace toy
