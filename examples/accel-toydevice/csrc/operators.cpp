// The operators. What makes, views or copies memory is here; everything else runs on the CPU, through torch's own fallback,
// which copies the arguments there and the results back.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
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

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(kType), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kType), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kType), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

// It writes the running statistics, which its schema does not say: the fallback would write into its own copies.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var,
    bool training,
    double momentum,
    double eps) {
  const auto [output, mean, deviation] = at::native_batch_norm(
      on_host(input), on_host(weight), on_host(bias), on_host(running_mean), on_host(running_var), training, momentum, eps);
  return {output.to(input.device()), mean.to(input.device()), deviation.to(input.device())};
}

// torch sends convolutions on a foreign device to these two, and never to the fallback.
at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  return at::convolution(
             on_host(input), on_host(weight), on_host(bias), stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [for_input, for_weight, for_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), at::IntArrayRef(channels), stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  const auto here = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {here(for_input), here(for_weight), here(for_bias)};
}

c10::DeviceIndex device_of(const c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().is_privateuseone()) {
      return argument.toTensor().get_device();
    }
  }
  return current_device();
}

// Random operators draw from the generator that they were given, or from that of the device on which they work.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto kGenerator = c10::OptionalType::create(c10::GeneratorType::get());
  const auto& declared = op.schema().arguments();
  const auto first = stack->size() - declared.size();
  for (size_t i = 0; i < declared.size(); ++i) {
    auto& argument = (*stack)[first + i];
    if (!declared[i].type()->isSubtypeOf(*kGenerator)) {
      continue;
    }
    if (argument.isNone()) {
      argument = host_generator(default_generator(device_of(torch::jit::last(*stack, declared.size()))));
    } else if (argument.toGenerator().device().type() == kType) {
      argument = host_generator(argument.toGenerator());
    }
  }
  at::native::cpu_fallback(op, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  // Left to torch, their results would be made with the shape of a mean, and resized with a warning.
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  library.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  library.impl("native_batch_norm", batch_norm);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("resize_", at::native::resize_);
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
