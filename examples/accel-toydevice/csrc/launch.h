// How an operator comes into a queue: its results are made at once, from their shapes, and are written later.
#pragma once

#include "queue.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <unordered_map>

namespace toy {

// CPU tensors over the memory of other tensors. They do not keep it: what runs in a queue may touch memory that was
// freed behind its back, and then it finds poison there, which is what it would find on hardware.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_; // two views of one memory stay that
};

at::Tensor on_host(const at::Tensor& tensor); // one of them

// Puts an operator that the CPU has into the current stream, and leaves on the stack what it will have computed.
void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The same, but the host waits for it: for what returns a number, or has a shape that depends on values.
void run_now(const c10::OperatorHandle& op, torch::jit::Stack* stack, const std::string& reason);

} // namespace toy
