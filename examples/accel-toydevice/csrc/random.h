// Random numbers: every device has a stream of its own, which is that of a CPU generator.
#pragma once

#include "queue.h"

#include <ATen/core/Generator.h>

namespace toy {

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);

// Enqueues a task that draws from a generator of this device. Draws happen in the order of the calls, whatever their streams are.
void enqueue_draw(const at::Generator& generator, const Stream& queue, Task task);

// The generator of the host from which a generator of this device draws.
at::Generator host_generator(const at::Generator& generator);

} // namespace toy
