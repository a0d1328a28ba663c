// Which operators `torch.autocast("toy")` casts: those that torch casts on every accelerator.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace toy {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { // named m because torch's macros expect it
#define NARROW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(NARROW)
  AT_FORALL_FP32(WIDE)
#undef NARROW
#undef WIDE
}

} // namespace toy
