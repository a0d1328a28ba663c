// The operators. What makes, views or copies memory is here; everything else is computed by the CPU, in the queue.
#include "launch.h"
#include "memory.h"
#include "random.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace toy {

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::ScalarType supported(std::optional<at::ScalarType> dtype) {
  const auto found = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(
      limits().float64 || (found != c10::kDouble && found != c10::kComplexDouble),
      "Cannot make a tensor of ", found, " on a toy device, which has no float64 here (TOY_FLOAT64=0). Use float32.");
  return found;
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(kType), kKeys, supported(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType), kKeys, supported(dtype));
}

// Between two devices, as CUDA does it: the stream of the source copies, after that of the target and before what it does next.
void copy_within(const at::Tensor& self, const at::Tensor& target) {
  const auto from = current_queue(self.get_device());
  const auto to = current_queue(target.get_device());
  if (from != to) {
    from->follow(to->mark());
  }
  Aliases aliases;
  from->add([source = aliases.of(self), into = aliases.of(target)] { into.copy_(source); });
  if (from != to) {
    to->follow(from->mark());
  }
}

// From pinned memory the queue reads what is there when it comes to it. From other memory it reads a copy that is made now.
void copy_from_host(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const auto queue = current_queue(target.get_device());
  const bool pinned = self.is_pinned();
  if (!non_blocking) {
    count_wait("copy to the device");
  }
  const auto source = non_blocking && !pinned ? self.detach().clone() : on_host(self);
  queue->add([source, into = on_host(target)] { into.copy_(source); });
  if (!non_blocking) {
    finish(queue->mark(), queue->device);
  } else if (pinned) {
    use_pinned(self.const_data_ptr(), queue->mark());
  }
}

// Into memory that is not pinned a copy may be late, too: CUDA is not, other devices are, and who relies on it is found.
void copy_to_host(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const auto queue = current_queue(self.get_device());
  const bool pinned = target.is_pinned();
  const bool late = non_blocking && (pinned || limits().late);
  if (!late) {
    count_wait("copy to the host");
  }
  const auto into = late && !pinned ? target.detach() : on_host(target); // kept alive, for it is only the host's
  queue->add([source = on_host(self), into] { into.copy_(source); });
  if (!late) {
    finish(queue->mark(), queue->device);
  } else if (pinned) {
    use_pinned(target.const_data_ptr(), queue->mark());
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (self.numel() == 0) {
    return target;
  }
  if (!self.is_privateuseone()) {
    copy_from_host(self, target, non_blocking);
  } else if (!target.is_privateuseone()) {
    copy_to_host(self, target, non_blocking);
  } else {
    copy_within(self, target);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (bytes > storage.nbytes()) {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow(self.storage(), at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset()));
  }
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  const auto bytes = stride.data() != nullptr
      ? at::detail::computeStorageNbytes(size, stride, self.itemsize(), offset)
      : at::detail::computeStorageNbytesContiguous(size, self.itemsize(), offset);
  grow(source, bytes); // torch would grow it by a copy of its own, which is not in the queue
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kType), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// That of the CPU draws from the host's generator, whatever it is given.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::empty_like(input, input.options().dtype(c10::kBool)).fill_(true)};
  }
  const auto kept = at::empty_like(input, input.options().dtype(c10::kBool)).bernoulli_(1 - p);
  return {input.mul(kept).mul_(p == 1 ? 0 : 1 / (1 - p)), kept};
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// torch sends convolutions on a foreign device to these two, and never to the fallback.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = find("aten::convolution");
  launch(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = find("aten::convolution_backward");
  constexpr size_t kArguments = 10;
  const auto arguments = torch::jit::last(*stack, kArguments);
  const auto& weight = arguments[2].toTensor();
  const int64_t channels = arguments[6].toBool() ? weight.size(1) * arguments[8].toInt() : weight.size(0);
  stack->insert(stack->end() - (kArguments - 3), c10::IValue(std::vector<int64_t>{channels}));
  launch(op, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  // Left to torch, their results would be made with the shape of a mean, and resized with a warning.
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&launch>());
  library.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&launch>());
  // Left to torch, a mask would be counted twice.
  library.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&launch>());
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  library.impl("native_dropout", dropout);
  library.impl("record_stream", record_stream_of);
  library.impl("resize_", resize);
  library.impl("set_", set_empty);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl(
      "set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("is_set_to", at::native::is_set_to);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("unfold", at::native::unfold);
  library.impl("_reshape_alias", at::native::_reshape_alias);
}

} // namespace toy
