// Collectives by way of another backend that works on the memory of the host, and the names that Python needs.
#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace toy {

namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Started = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) {
    found.push_back(toy::on_host(tensor));
  }
  return found;
}

Lists on_host(const Lists& lists) {
  Lists found;
  for (const auto& tensors : lists) {
    found.push_back(on_host(tensors));
  }
  return found;
}

// What tells torch that a collective is done, with its results as tensors of this device.
template <typename Results>
Started finishing(const Started& work, Results results, c10::Device device, const c10::TypePtr& type) {
  auto done = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device});
  work->getFuture()->addCallback([done, results = std::move(results)](c10::ivalue::Future& inner) {
    if (inner.hasError()) {
      done->setError(inner.exception_ptr());
    } else {
      done->markCompleted(c10::IValue(results));
    }
  });
  return c10d::Work::create_from_future(done);
}

Started finishing(const Started& work, const Tensors& results, c10::Device device) {
  return finishing(work, results, device, c10::ListType::ofTensors());
}

Started finishing(const Started& work, const Lists& results, c10::Device device) {
  return finishing(work, results, device, c10::ListType::create(c10::ListType::ofTensors()));
}

class Backend final : public c10d::Backend {
 public:
  explicit Backend(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override {
    return "toyccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return host_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    host_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    host_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return host_->getSequenceNumberForGroup();
  }
  void abort() override {
    host_->abort();
  }
  void shutdown() override {
    host_->shutdown();
  }

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto hosted = on_host(tensors);
    return finishing(host_->broadcast(hosted, options), tensors, tensors.at(0).device());
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto hosted = on_host(tensors);
    return finishing(host_->allreduce(hosted, options), tensors, tensors.at(0).device());
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto hosted = on_host(tensors);
    return finishing(host_->allreduce_coalesced(hosted, options), tensors, tensors.at(0).device());
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto hosted = on_host(tensors);
    return finishing(host_->reduce(hosted, options), tensors, tensors.at(0).device());
  }
  Started allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto received = on_host(outputs);
    auto sent = on_host(inputs);
    return finishing(host_->allgather(received, sent, options), outputs, inputs.at(0).device());
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto received = toy::on_host(output);
    auto sent = toy::on_host(input);
    return finishing(host_->_allgather_base(received, sent, options), Tensors{output}, input.device());
  }
  Started gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto received = on_host(outputs);
    auto sent = on_host(inputs);
    return finishing(host_->gather(received, sent, options), outputs, inputs.at(0).device());
  }
  Started scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto received = on_host(outputs);
    auto sent = on_host(inputs);
    return finishing(host_->scatter(received, sent, options), outputs, outputs.at(0).device());
  }
  Started alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto received = toy::on_host(output);
    auto sent = toy::on_host(input);
    return finishing(
        host_->alltoall_base(received, sent, output_sizes, input_sizes, options), Tensors{output}, input.device());
  }

  // Of these gloo makes no future: waiting for them is what there is.
  Started reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto received = on_host(outputs);
    auto sent = on_host(inputs);
    return host_->reduce_scatter(received, sent, options);
  }
  Started _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto received = toy::on_host(output);
    auto sent = toy::on_host(input);
    return host_->_reduce_scatter_base(received, sent, options);
  }
  Started barrier(const c10d::BarrierOptions& options) override {
    return host_->barrier(options);
  }
  Started send(Tensors& tensors, int target, int tag) override {
    auto hosted = on_host(tensors);
    return host_->send(hosted, target, tag);
  }
  Started recv(Tensors& tensors, int source, int tag) override {
    auto hosted = on_host(tensors);
    return host_->recv(hosted, source, tag);
  }
  Started recvAnysource(Tensors& tensors, int tag) override {
    auto hosted = on_host(tensors);
    return host_->recvAnysource(hosted, tag);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> host_;
};

} // namespace

} // namespace toy

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  toy::register_allocator();
  module.attr("device_count") = static_cast<int>(toy::kCount);
  module.def("current_device", [] { return static_cast<int>(toy::current_device()); });
  module.def("set_device", [](int index) { toy::set_device(static_cast<c10::DeviceIndex>(index)); });
  module.def("default_generator", [](int index) {
    return toy::default_generator(static_cast<c10::DeviceIndex>(index));
  });
  module.def("over", [](const c10::intrusive_ptr<c10d::Backend>& host) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<toy::Backend>(host));
  });
}
