// The collectives of the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace toy {

constexpr const char* kCollectives = "toyccl";

// Those of a backend that works on the memory of the host, for tensors of this device.
c10::intrusive_ptr<c10d::Backend> collectives_over(const c10::intrusive_ptr<c10d::Backend>& host);

// How many communicators there are: a backend makes one for each device at its first collective there, as NCCL does.
int64_t communicators();

} // namespace toy
