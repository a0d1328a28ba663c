// What the parts of the device share: how many there are, which one is current, and its memory as seen from the host.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>

namespace toy {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kCount = 2;
constexpr size_t kCapacity = size_t{1} << 30; // bytes of one device; more is refused, as a real device would

c10::DeviceIndex current_device() noexcept;
void set_device(c10::DeviceIndex index);

// Makes the allocator known to torch. The device guard and the hooks of the device register themselves.
void register_allocator();

const at::Generator& default_generator(c10::DeviceIndex index);

// The generator of the host from which a generator of this device draws.
const at::Generator& host_generator(const at::Generator& generator);

// A CPU tensor over the memory of a tensor of this device, which it keeps alive. A CPU tensor comes back as it is.
at::Tensor on_host(const at::Tensor& tensor);
std::optional<at::Tensor> on_host(const std::optional<at::Tensor>& tensor);

} // namespace toy
