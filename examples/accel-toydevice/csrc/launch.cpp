#include "launch.h"

#include "random.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <unordered_set>

namespace toy {

namespace {

using torch::jit::Stack;

// Their shapes depend on values; torch says so of some only when it runs them on meta tensors, which costs time.
const std::unordered_set<std::string> kNeedValues{
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::nonzero.out", "aten::masked_select",
    "aten::masked_select.out", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::is_set_to", "aten::_unique"};

// Their tensors of indices may be on the host.
const std::unordered_set<std::string> kIndexed{
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_", "aten::index_put.out",
    "aten::_index_put_impl_", "aten::_index_put_impl", "aten::_index_put_impl.out", "aten::_unsafe_index.Tensor",
    "aten::_unsafe_index_put"};

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Calls a function with every tensor in the values, and puts what it returns in the place of it.
template <typename Function>
void replace_tensors(c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      value = function(value.toTensor());
    }
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? function(tensor) : tensor);
    }
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(function(*tensor)) : tensor);
    }
    value = list;
  }
}

template <typename Values, typename Function>
void for_tensors(const Values& values, Function&& function) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      c10::IValue copy = value;
      replace_tensors(copy, [&](const at::Tensor& tensor) {
        function(tensor);
        return tensor;
      });
    }
  }
}

// Where the results will be; an error if the tensors are not in one place.
c10::Device device_of(const c10::OperatorHandle& op, const c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  bool on_cpu = false;
  for_tensors(arguments, [&](const at::Tensor& tensor) {
    if (tensor.is_privateuseone()) {
      TORCH_CHECK(
          !found || *found == tensor.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
          tensor.device(), "! (when checking arguments of ", name_of(op), ")");
      found = tensor.device();
    } else {
      on_cpu |= tensor.is_cpu() && (tensor.dim() > 0 || name_of(op).starts_with("aten::_fused_"));
    }
  });
  TORCH_CHECK(
      !on_cpu || !found || kIndexed.count(name_of(op)) == 1,
      "Expected all tensors to be on the same device, but found at least two devices, ", *found,
      " and cpu! (when checking arguments of ", name_of(op), ")");
  for (const auto& argument : arguments) {
    if (!found && argument.isDevice() && argument.toDevice().type() == kType) {
      found = argument.toDevice();
    }
  }
  const auto device = found.value_or(c10::Device(kType, current_device()));
  return {kType, index_of(device)};
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.is_cpu()) {
    return tensor; // as kernels for meta tensors that are written in Python expect it
  }
  auto meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(false));
  meta._set_conj(tensor.is_conj());
  meta._set_neg(tensor.is_neg());
  return meta;
}

at::Tensor here(const at::Tensor& tensor, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      tensor.scalar_type());
}

// Arguments as the thread of the queue needs them, and the generator from which it draws.
struct Call {
  Call(const c10::OperatorHandle& op, const c10::ArrayRef<c10::IValue> arguments, c10::Device device) : op(op) {
    static const auto kGenerator = c10::OptionalType::create(c10::GeneratorType::get());
    const auto& declared = op.schema().arguments();
    Aliases aliases;
    for (size_t i = 0; i < declared.size(); ++i) {
      c10::IValue value = arguments[i];
      const bool written = declared[i].alias_info() != nullptr && declared[i].alias_info()->isWrite();
      replace_tensors(value, [&](const at::Tensor& tensor) {
        // Of the host's memory it is the value now that counts, as for a number that is passed to a kernel.
        return tensor.is_privateuseone() ? aliases.of(tensor) : written ? tensor : frozen(tensor);
      });
      if (value.isDevice() && value.toDevice().type() == kType) {
        value = c10::Device(c10::kCPU);
      } else if (declared[i].type()->isSubtypeOf(*kGenerator)) {
        if (value.isNone() || value.toGenerator().device().type() == kType) {
          generator = value.isNone() ? default_generator(device.index()) : value.toGenerator();
          value = host_generator(*generator);
        }
      }
      stack.push_back(std::move(value));
    }
  }

  static at::Tensor frozen(const at::Tensor& tensor) {
    auto copy = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) { // such a number does not decide the dtype of results
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return copy;
  }

  void run() {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }

  void enqueue(const Stream& queue, Task task) const {
    if (generator) {
      enqueue_draw(*generator, queue, std::move(task));
    } else {
      queue->add(std::move(task));
    }
  }

  c10::OperatorHandle op;
  Stack stack;
  std::optional<at::Generator> generator;
};

// Whether positions are given by a mask, so that how many there are depends on values. One number put there needs no count.
bool counts_mask(const c10::OperatorHandle& op, const c10::ArrayRef<c10::IValue> arguments) {
  if (kIndexed.count(name_of(op)) == 0) {
    return false;
  }
  const bool puts_one = arguments.size() > 2 && arguments[2].isTensor() && arguments[2].toTensor().numel() == 1;
  bool masked = false;
  for (const auto& index : arguments[1].toOptionalTensorVector()) {
    masked |= index && index->defined() && (index->scalar_type() == c10::kBool || index->scalar_type() == c10::kByte);
  }
  return masked && !puts_one;
}

// The argument that a result is, if the operator writes into one and returns it.
std::optional<size_t> argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) {
    return std::nullopt;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      result.alias_info()->isWrite(), schema.name(), " makes a view, which a toy device cannot do without a kernel for it.");
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) {
      return i;
    }
  }
  return std::nullopt;
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const bool tensors = result.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
        result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensors) {
      return false;
    }
  }
  return true;
}

// Whether a result was asked for: of some gradients only those that the mask names.
bool asked_for(const c10::FunctionSchema& schema, const c10::ArrayRef<c10::IValue> arguments, size_t result) {
  const auto& last = schema.arguments().back();
  if (last.name() != "output_mask" || !arguments.back().isBoolList()) {
    return true;
  }
  const auto mask = arguments.back().toBoolList();
  return result >= mask.size() || mask.get(result);
}

// The shapes of the results, and of what is written into, as the operator leaves them on meta tensors.
struct Shapes {
  Stack arguments;
  Stack results;
};

std::optional<Shapes> shapes_of(const c10::OperatorHandle& op, const c10::ArrayRef<c10::IValue> arguments) {
  static const auto kGenerator = c10::OptionalType::create(c10::GeneratorType::get());
  const auto& declared = op.schema().arguments();
  std::unordered_map<const c10::TensorImpl*, at::Tensor> metas;
  Shapes shapes;
  for (size_t i = 0; i < declared.size(); ++i) {
    c10::IValue value = arguments[i];
    replace_tensors(value, [&](const at::Tensor& tensor) {
      auto& meta = metas[tensor.unsafeGetTensorImpl()];
      if (!meta.defined()) {
        meta = on_meta(tensor);
      }
      return meta;
    });
    if (value.isDevice()) {
      value = c10::Device(c10::kMeta);
    } else if (declared[i].type()->isSubtypeOf(*kGenerator)) {
      value = c10::IValue();
    }
    shapes.arguments.push_back(std::move(value));
  }
  shapes.results = shapes.arguments;
  try {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes.results);
  } catch (const std::exception&) {
    return std::nullopt; // it has no such kernel, or an error that the CPU will say better
  }
  return shapes;
}

// `out=` is given the size of the result, as torch does it everywhere.
void fit(const at::Tensor& tensor, const at::Tensor& shape) {
  if (tensor.sizes() == shape.sizes()) {
    return;
  }
  tensor.resize_(shape.sizes());
  if (tensor.strides() != shape.strides()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
  }
}

void fit(const c10::IValue& value, const c10::IValue& shape) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) {
    fit(value.toTensor(), shape.toTensor());
  } else if (value.isTensorList()) {
    const auto shapes = shape.toTensorVector();
    size_t i = 0;
    for (const auto& tensor : value.toTensorVector()) {
      if (tensor.is_privateuseone()) {
        fit(tensor, shapes[i]);
      }
      ++i;
    }
  }
}

void write(const at::Tensor& result, const at::Tensor& target, const c10::OperatorHandle& op) {
  if (result.defined() && result.numel() == 0) {
    return; // what the CPU leaves out because it is not needed, as the statistics of a batch norm that does not train
  }
  TORCH_CHECK(
      result.defined() && result.sizes() == target.sizes(),
      name_of(op), " computed a tensor of ", result.defined() ? result.sizes() : c10::IntArrayRef{},
      " where its shapes on meta tensors say ", target.sizes(), ": a toy device cannot enqueue it.");
  target.copy_(result);
}

void write(const c10::IValue& result, const c10::IValue& target, const c10::OperatorHandle& op) {
  if (target.isTensorList()) {
    const auto results = result.toTensorVector();
    const auto targets = target.toTensorVector();
    for (size_t i = 0; i < targets.size(); ++i) {
      write(results.at(i), targets[i], op);
    }
  } else if (target.isTensor() && target.toTensor().defined()) {
    write(result.toTensor(), target.toTensor(), op);
  }
}

// Leaves the results on the stack, in the place of the arguments.
void return_results(Stack* stack, size_t count, Stack results) {
  torch::jit::drop(*stack, count);
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
}

} // namespace

at::Tensor Aliases::of(const at::Tensor& tensor) {
  auto* impl = tensor.storage().unsafeGetStorageImpl();
  auto& storage = storages_[impl];
  if (!storage) {
    storage = c10::Storage(
        c10::Storage::use_byte_size_t(), impl->nbytes(), c10::DataPtr(impl->mutable_data(), c10::Device(c10::kCPU)),
        nullptr, false);
  }
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

at::Tensor on_host(const at::Tensor& tensor) {
  return Aliases().of(tensor);
}

void run_now(const c10::OperatorHandle& op, Stack* stack, const std::string& reason) {
  const auto count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const auto device = device_of(op, arguments);
  const auto queue = current_queue(device.index());
  count_wait(reason);
  auto call = std::make_shared<Call>(op, arguments, device);
  auto error = std::make_shared<std::exception_ptr>();
  call->enqueue(queue, [call, error] {
    try {
      call->run();
    } catch (...) {
      *error = std::current_exception();
    }
  });
  finish(queue->mark(), queue->device);
  if (*error) {
    std::rethrow_exception(*error);
  }
  Stack results;
  const auto& returns = op.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (const auto own = argument_of(op.schema(), returns[i])) {
      const auto& given = arguments[*own];
      fit(given, call->stack[i]);
      results.push_back(given);
      continue;
    }
    c10::IValue result = call->stack[i];
    replace_tensors(result, [&](const at::Tensor& tensor) {
      const auto placed = here(tensor, device);
      queue->add([tensor, target = on_host(placed)] { target.copy_(tensor); });
      return placed;
    });
    results.push_back(std::move(result));
  }
  return_results(stack, count, std::move(results));
}

void launch(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const auto device = device_of(op, arguments);
  if (!returns_tensors(schema) || kNeedValues.count(name_of(op)) == 1 || counts_mask(op, arguments)) {
    return run_now(op, stack, name_of(op));
  }
  const bool known = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU); // else torch's error says what has it
  const auto shapes = known ? shapes_of(op, arguments) : std::nullopt;
  if (!shapes) {
    return run_now(op, stack, name_of(op));
  }
  for (size_t i = 0; i < count; ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      fit(arguments[i], shapes->arguments[i]);
    }
  }
  Stack results;
  Stack targets;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (const auto own = argument_of(schema, schema.returns()[i])) {
      results.push_back(arguments[*own]);
      targets.emplace_back();
      continue;
    }
    c10::IValue result = asked_for(schema, arguments, i) ? shapes->results[i] : c10::IValue(at::Tensor());
    replace_tensors(result, [&](const at::Tensor& tensor) { return here(tensor, device); });
    c10::IValue target = result;
    replace_tensors(target, [](const at::Tensor& tensor) { return on_host(tensor); });
    results.push_back(std::move(result));
    targets.push_back(std::move(target));
  }
  auto call = std::make_shared<Call>(op, arguments, device);
  call->enqueue(current_queue(device.index()), [call, targets] {
    call->run();
    for (size_t i = 0; i < targets.size(); ++i) {
      write(call->stack[i], targets[i], call->op);
    }
  });
  return_results(stack, count, std::move(results));
}

} // namespace toy
