// Memory of the device, which a stream may still be using when the host frees it, and pinned memory of the host.
#pragma once

#include "queue.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace toy {

void register_allocator();

// Memory that is used by another stream than the one it was allocated on is not freed before that stream has passed.
void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);

// Gives a storage of the device another size, with what was in it, in the order of the current stream.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
void use_pinned(const void* data, const Place& until);

} // namespace toy
