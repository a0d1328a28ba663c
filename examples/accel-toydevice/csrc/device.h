// What the parts of the device share: how many there are, which one is current, and what this one cannot do.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <vector>

namespace toy {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kMost = 2;
constexpr size_t kCapacity = size_t{1} << 30; // bytes of one device; more is refused, as a real device would

// What a maker's device may lack. Read from the environment when the device is imported, and the same from then on.
struct Limits {
  std::vector<int> visible; // TOY_VISIBLE_DEVICES: which of the devices this process sees, as "0,1"
  bool float64; // TOY_FLOAT64=0: there is none, as on MPS
  bool late; // TOY_LATE_COPIES=0: a copy into memory that is not pinned is done when the call returns, as on CUDA
  bool statistics; // TOY_STATISTICS=0: the allocator is no DeviceAllocator, so it has none for torch.accelerator.memory
  bool uuid; // TOY_UUID=0: the properties of a device do not tell two devices apart
  size_t length; // TOY_QUEUE_LENGTH: how many kernels wait in a stream before the host waits, too
};

const Limits& limits();
c10::DeviceIndex device_count() noexcept;

c10::DeviceIndex current_device() noexcept;
void set_device(c10::DeviceIndex index);
void set_device_unchecked(c10::DeviceIndex index) noexcept;

// The index itself; an error that names what there is, if there is no such device.
c10::DeviceIndex checked(c10::DeviceIndex index);
c10::DeviceIndex index_of(c10::Device device);

} // namespace toy
