// The collectives of the device, with the manners of NCCL: they take no tensors of the host, lack some dtypes, return at once,
// run in a stream of their own, and make the current stream wait for them, not the host. Underneath they are those of gloo,
// on copies: after an abort gloo may still write, when the memory belongs to someone else.
#include "collectives.h"

#include "communicator.h"
#include "launch.h"
#include "memory.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <numeric>
#include <optional>

namespace toy {

namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;

std::atomic<int64_t> count{0};

// The elements of a tensor in the order of its memory, as a CPU tensor that does not keep it.
at::Tensor line(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.is_privateuseone() && tensor.layout() == c10::kStrided,
      "Tensors must be of a toy device and dense, but one is on ", tensor.device(), ". ", kCollectives,
      " has no collectives for it.");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype != c10::kShort && dtype != c10::kUInt16 && dtype != c10::kUInt32 && dtype != c10::kUInt64,
      "Input tensor data type is not supported for ", kCollectives, " process group: ", dtype);
  TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous.");
  return on_host(tensor).as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

Tensors lines(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) {
    found.push_back(line(tensor));
  }
  return found;
}

at::Tensor bytes(const at::Tensor& line) {
  return line.view(c10::kByte);
}

int64_t size_of(const Tensors& lines) {
  int64_t size = 0;
  for (const auto& line : lines) {
    size += line.numel();
  }
  return size;
}

void copy_parts(const at::Tensor& from, const Tensors& into) {
  int64_t begin = 0;
  for (const auto& part : into) {
    part.copy_(from.narrow(0, begin, part.numel()));
    begin += part.numel();
  }
}

void check_reducible(const ReduceOp& how, const at::Tensor& line) {
  TORCH_CHECK(
      how != ReduceOp::BAND && how != ReduceOp::BOR && how != ReduceOp::BXOR, "Cannot use a bitwise ReduceOp with ",
      kCollectives);
  TORCH_CHECK(how != ReduceOp::AVG || line.scalar_type() != c10::kBool, "Cannot use ReduceOp.AVG with bool tensors");
}

// A copy as gloo can reduce it, and the operation that it does then.
at::Tensor reducible(const at::Tensor& line, const ReduceOp& how) {
  auto copy = line.clone();
  if (how == ReduceOp::PREMUL_SUM) {
    const auto* extra = static_cast<c10d::PreMulSumSupplement*>(how.supplement_.get());
    extra->tensor_factor.defined() ? copy.mul_(on_host(extra->tensor_factor)) : copy.mul_(extra->double_factor);
  }
  return copy.is_complex() ? at::view_as_real(copy).reshape(-1) : copy.scalar_type() == c10::kBool ? bytes(copy) : copy;
}

ReduceOp reduction(const ReduceOp& how, const at::Tensor& line) {
  const auto sum = how == ReduceOp::AVG || how == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : how;
  return line.scalar_type() == c10::kBool && sum == ReduceOp::SUM ? ReduceOp(ReduceOp::MAX) : sum;
}

at::Tensor reduced(const at::Tensor& sum, const ReduceOp& how, const at::Tensor& line, int size) {
  if (how == ReduceOp::AVG) {
    at::isFloatingType(sum.scalar_type()) ? sum.div_(size) : sum.div_(size, "floor");
  }
  return line.is_complex() ? at::view_as_complex(sum.reshape({-1, 2})) : sum;
}

// What torch holds of a collective in the queue. Waiting for it makes the current stream wait, and the host goes on.
class Enqueued final : public c10d::Work {
 public:
  Enqueued(int rank, OpType type, Tensors results, const Stream& queue, Place done, std::shared_ptr<std::exception_ptr> error)
      : c10d::Work(rank, type), results_(std::move(results)), queue_(queue), done_(std::move(done)), error_(std::move(error)) {
    const c10::Device device(kType, queue->device);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector<c10::Device>{device});
    // Completed now, for the host; who waits for the future waits for the event that it records in this stream.
    const c10::StreamGuard guard(stream_of(*queue));
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override {
    return done_->reached();
  }
  bool isSuccess() const override {
    return done_->reached() && !*error_;
  }
  std::exception_ptr exception() const override {
    return done_->reached() ? *error_ : nullptr;
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  void synchronize() override {
    current_queue(queue_->device)->follow(done_);
  }
  void blockCurrentStream() override {
    synchronize();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (retrieveOpType() == OpType::BARRIER) {
      wait_for(done_, queue_->device, "barrier");
    } else if (timeout != kNoTimeout) {
      count_wait("synchronize with a timeout");
      const WithoutInterpreter without;
      TORCH_CHECK_WITH(
          DistBackendError, done_->wait_for(timeout), kCollectives, ": a collective was not done after ", timeout.count(),
          " ms.");
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Tensors results_;
  Stream queue_;
  Place done_;
  std::shared_ptr<std::exception_ptr> error_; // written before the place is reached
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Backend final : public c10d::Backend {
 public:
  explicit Backend(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), peers_(std::make_shared<Communicator>(std::move(host))) {}

  ~Backend() override {
    close();
  }

  const std::string getBackendName() const override {
    return kCollectives;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return peers_->host->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    peers_->host->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    peers_->host->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return peers_->host->getSequenceNumberForGroup();
  }
  c10d::ErrorType getError() override {
    return peers_->aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
  }
  void eagerConnectSingleDevice(at::Device device) override {
    queue_on(device);
  }

  void abort() override {
    peers_->abort();
    close();
  }

  // As NCCL, it lets what is queued end. A peer that is gone is not waited for without end.
  void shutdown() override {
    for (const auto& [device, queue] : queues_) {
      const WithoutInterpreter without;
      if (!queue->mark()->wait_for(kFarewell)) {
        peers_->abort();
      }
    }
    close();
  }

  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override {
    together_ = Together{};
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    auto together = std::move(*together_);
    together_.reset();
    if (together.collectives.empty()) {
      return nullptr;
    }
    return enqueue(OpType::COALESCED, together.used, together.results, std::move(together.collectives));
  }

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return enqueue(OpType::BROADCAST, tensors, tensors, {broadcasting(line(one(tensors)), options.rootRank)});
  }
  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return enqueue(OpType::ALLREDUCE, tensors, tensors, {reducing(line(one(tensors)), options.reduceOp)});
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Collective> all;
    for (const auto& each : lines(tensors)) {
      all.push_back(reducing(each, options.reduceOp));
    }
    return enqueue(OpType::ALLREDUCE_COALESCED, tensors, tensors, std::move(all));
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto own = line(one(tensors));
    check_reducible(options.reduceOp, own);
    const auto copy = std::make_shared<at::Tensor>();
    const auto begin = [=, host = peers_->host] {
      *copy = reducible(own, options.reduceOp);
      auto inner = options;
      inner.reduceOp = reduction(options.reduceOp, own);
      Tensors given{*copy};
      return host->reduce(given, inner);
    };
    const auto end = [=, size = size_, root = rank_ == options.rootRank] {
      if (root) {
        own.copy_(reduced(*copy, options.reduceOp, own, size));
      }
    };
    return enqueue(OpType::REDUCE, tensors, tensors, {{begin, end}});
  }

  Started allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    const auto& into = one(outputs);
    auto used = inputs;
    used.insert(used.end(), into.begin(), into.end());
    return enqueue(OpType::ALLGATHER, used, into, gathering(lines(into), line(one(inputs))));
  }
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return enqueue(OpType::_ALLGATHER_BASE, {output, input}, {output}, gathering(parts(line(output)), line(input)));
  }
  Started allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Collective> all;
    for (size_t i = 0; i < outputs.size(); ++i) {
      for (auto& each : gathering(parts(line(outputs[i])), line(inputs[i]))) {
        all.push_back(std::move(each));
      }
    }
    auto used = outputs;
    used.insert(used.end(), inputs.begin(), inputs.end());
    return enqueue(OpType::COALESCED, used, outputs, std::move(all));
  }

  Started reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto used = one(inputs);
    const auto scattered = scattering(line(one(outputs)), lines(used), options.reduceOp);
    used.push_back(outputs[0]);
    return enqueue(OpType::REDUCE_SCATTER, used, outputs, {scattered});
  }
  Started _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const auto scattered = scattering(line(output), {line(input)}, options.reduceOp);
    return enqueue(OpType::_REDUCE_SCATTER_BASE, {output, input}, {output}, {scattered});
  }
  Started reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Collective> all;
    for (size_t i = 0; i < outputs.size(); ++i) {
      all.push_back(scattering(line(outputs[i]), {line(inputs[i])}, options.reduceOp));
    }
    auto used = outputs;
    used.insert(used.end(), inputs.begin(), inputs.end());
    return enqueue(OpType::COALESCED, used, outputs, std::move(all));
  }

  Started gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto results = outputs.empty() ? Tensors{} : one(outputs);
    const auto own = line(one(inputs));
    const auto into = lines(results);
    const auto received = std::make_shared<Tensors>();
    const auto begin = [=, host = peers_->host] {
      for (const auto& each : into) {
        received->push_back(bytes(each.clone()));
      }
      Tensors given{bytes(own.clone())};
      auto lists = into.empty() ? Lists{} : Lists{*received};
      return host->gather(lists, given, options);
    };
    const auto end = [=] { copy_bytes(*received, into); };
    auto used = results;
    used.push_back(inputs[0]);
    return enqueue(OpType::GATHER, used, results, {{begin, end}});
  }
  Started scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    const auto given = inputs.empty() ? Tensors{} : one(inputs);
    const auto own = line(one(outputs));
    const auto from = lines(given);
    const auto received = std::make_shared<Tensors>();
    const auto begin = [=, host = peers_->host] {
      received->push_back(bytes(own.clone()));
      Tensors sent;
      for (const auto& each : from) {
        sent.push_back(bytes(each.clone()));
      }
      auto lists = from.empty() ? Lists{} : Lists{sent};
      return host->scatter(*received, lists, options);
    };
    const auto end = [=] { copy_bytes(*received, {own}); };
    auto used = given;
    used.push_back(outputs[0]);
    return enqueue(OpType::SCATTER, used, outputs, {{begin, end}});
  }

  Started alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    const auto exchanged =
        exchanging({line(output)}, {line(input)}, in_bytes(output_sizes, output), in_bytes(input_sizes, input), options);
    return enqueue(OpType::ALLTOALL_BASE, {output, input}, {output}, {exchanged});
  }
  Started alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto into = lines(outputs);
    const auto from = lines(inputs);
    auto used = outputs;
    used.insert(used.end(), inputs.begin(), inputs.end());
    const auto exchanged = exchanging(into, from, sizes_in_bytes(into), sizes_in_bytes(from), options);
    return enqueue(OpType::ALLTOALL, used, outputs, {exchanged});
  }

  Started send(Tensors& tensors, int target, int tag) override {
    const auto own = line(one(tensors));
    const auto begin = [=, host = peers_->host] {
      Tensors given{bytes(own.clone())};
      return host->send(given, target, tag);
    };
    return enqueue(OpType::SEND, tensors, tensors, {{begin, [] {}, true}});
  }
  Started recv(Tensors& tensors, int source, int tag) override {
    return receiving(OpType::RECV, tensors, [=, host = peers_->host](Tensors& into) { return host->recv(into, source, tag); });
  }
  Started recvAnysource(Tensors& tensors, int tag) override {
    return receiving(
        OpType::RECVANYSOURCE, tensors, [=, host = peers_->host](Tensors& into) { return host->recvAnysource(into, tag); });
  }

  // As NCCL's: a collective like others, for which the host waits.
  Started barrier(const c10d::BarrierOptions& options) override {
    const auto index = options.device ? options.device->index()
        : !options.device_ids.empty() ? static_cast<c10::DeviceIndex>(options.device_ids[0])
                                      : current_device();
    const c10::DeviceGuard guard(c10::Device(kType, checked(index)));
    const auto here = at::zeros({1}, at::TensorOptions(kType));
    return enqueue(OpType::BARRIER, {here}, {here}, {reducing(line(here), ReduceOp::SUM)});
  }

 private:
  static constexpr std::chrono::seconds kFarewell{30};

  struct Together {
    Tensors used;
    Tensors results;
    std::vector<Collective> collectives;
  };

  template <typename Item>
  static const Item& one(const std::vector<Item>& items) {
    TORCH_CHECK(items.size() == 1, kCollectives, " takes one tensor, or one list of them, of this rank. Got ", items.size());
    return items[0];
  }

  static void copy_bytes(const Tensors& from, const Tensors& into) {
    for (size_t i = 0; i < into.size(); ++i) {
      bytes(into[i]).copy_(from[i]);
    }
  }

  static std::vector<int64_t> in_bytes(const std::vector<int64_t>& rows, const at::Tensor& tensor) {
    auto found = rows;
    for (auto& each : found) {
      each *= tensor.numel() / tensor.size(0) * tensor.element_size();
    }
    return found;
  }

  static std::vector<int64_t> sizes_in_bytes(const Tensors& lines) {
    std::vector<int64_t> found;
    for (const auto& each : lines) {
      found.push_back(each.numel() * each.element_size());
    }
    return found;
  }

  Tensors parts(const at::Tensor& line) const {
    TORCH_CHECK(line.numel() % size_ == 0, "A tensor of ", line.numel(), " elements has no part of equal size for each rank.");
    return line.chunk(size_);
  }

  Collective broadcasting(const at::Tensor& own, int64_t root) const {
    const auto copy = std::make_shared<at::Tensor>();
    const auto begin = [=, host = peers_->host] {
      *copy = bytes(own.clone());
      Tensors given{*copy};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return host->broadcast(given, options);
    };
    return {begin, [=] { bytes(own).copy_(*copy); }};
  }

  Collective reducing(const at::Tensor& own, const ReduceOp& how) const {
    check_reducible(how, own);
    const auto copy = std::make_shared<at::Tensor>();
    const auto begin = [=, host = peers_->host] {
      *copy = reducible(own, how);
      Tensors given{*copy};
      c10d::AllreduceOptions options;
      options.reduceOp = reduction(how, own);
      return host->allreduce(given, options);
    };
    return {begin, [=, size = size_] { own.copy_(reduced(*copy, how, own, size)); }};
  }

  // Reduces everything, and keeps the part of this rank: gloo's own is not for every dtype.
  Collective scattering(const at::Tensor& own, const Tensors& from, const ReduceOp& how) const {
    check_reducible(how, own);
    TORCH_CHECK(
        size_of(from) == own.numel() * size_, "A part of ", own.numel(), " elements for each of ", size_, " ranks is not ",
        size_of(from), " elements.");
    const auto copy = std::make_shared<at::Tensor>();
    const auto begin = [=, host = peers_->host] {
      *copy = reducible(at::cat(from), how);
      Tensors given{*copy};
      c10d::AllreduceOptions options;
      options.reduceOp = reduction(how, own);
      return host->allreduce(given, options);
    };
    const auto end = [=, size = size_, rank = rank_] {
      own.copy_(reduced(*copy, how, own, size).narrow(0, rank * own.numel(), own.numel()));
    };
    return {begin, end};
  }

  std::vector<Collective> gathering(const Tensors& into, const at::Tensor& own) const {
    std::vector<Collective> all;
    const bool even = std::all_of(into.begin(), into.end(), [&](const auto& each) { return each.numel() == own.numel(); });
    if (!even) { // as NCCL does it: every rank sends its own to all
      for (int rank = 0; rank < size_; ++rank) {
        auto each = broadcasting(into.at(rank), rank);
        if (rank == rank_) {
          each.begin = [=, begin = each.begin] {
            into[rank].copy_(own);
            return begin();
          };
        }
        all.push_back(std::move(each));
      }
      return all;
    }
    const auto received = std::make_shared<at::Tensor>();
    const auto begin = [=, host = peers_->host, size = size_] {
      auto given = bytes(own.clone());
      *received = at::empty({given.numel() * size}, given.options());
      return host->_allgather_base(*received, given, {});
    };
    const auto end = [=] {
      Tensors flat;
      for (const auto& each : into) {
        flat.push_back(bytes(each));
      }
      copy_parts(*received, flat);
    };
    return {{begin, end}};
  }

  Collective exchanging(
      const Tensors& into,
      const Tensors& from,
      std::vector<int64_t> received_sizes,
      std::vector<int64_t> sent_sizes,
      const c10d::AllToAllOptions& options) const {
    const auto received = std::make_shared<at::Tensor>();
    const auto begin = [=, host = peers_->host]() mutable {
      auto sent = bytes(at::cat(from));
      *received = bytes(at::cat(into));
      return host->alltoall_base(*received, sent, received_sizes, sent_sizes, options);
    };
    const auto end = [=] {
      Tensors flat;
      for (const auto& each : into) {
        flat.push_back(bytes(each));
      }
      copy_parts(*received, flat);
    };
    return {begin, end};
  }

  template <typename Receive>
  Started receiving(OpType type, const Tensors& tensors, Receive receive) {
    const auto own = line(one(tensors));
    const auto received = std::make_shared<Tensors>();
    const auto begin = [=] {
      received->push_back(bytes(own.clone()));
      return receive(*received);
    };
    const auto end = [=] { copy_bytes(*received, {own}); };
    return enqueue(type, tensors, tensors, {{begin, end, true}});
  }

  Stream queue_on(c10::Device device) {
    TORCH_CHECK_WITH(
        DistBackendError, !peers_->aborted() && !closed_, kCollectives, ": the communicator of rank ", rank_,
        peers_->aborted() ? " was aborted, or a collective in it has failed." : " was shut down.");
    auto& queue = queues_[device.index()];
    if (!queue) {
      queue = new_queue(device.index());
      ++count;
    }
    return queue;
  }

  Started enqueue(OpType type, const Tensors& used, const Tensors& results, std::vector<Collective> collectives) {
    const auto device = used.at(0).device();
    const auto queue = queue_on(device);
    if (together_) {
      together_->used.insert(together_->used.end(), used.begin(), used.end());
      together_->results.insert(together_->results.end(), results.begin(), results.end());
      std::move(collectives.begin(), collectives.end(), std::back_inserter(together_->collectives));
      return nullptr;
    }
    queue->follow(current_queue(device.index())->mark());
    const auto error = std::make_shared<std::exception_ptr>();
    queue->add([peers = peers_, collectives = std::move(collectives), error] {
      try {
        peers->run(collectives);
      } catch (...) {
        *error = std::current_exception();
        throw;
      }
    });
    for (const auto& tensor : used) {
      record_stream(tensor.storage().data_ptr(), stream_of(*queue));
    }
    return c10::make_intrusive<Enqueued>(rank_, type, results, queue, queue->mark(), error);
  }

  void close() {
    closed_ = true;
    for (const auto& [device, queue] : queues_) {
      queue->close();
      --count;
    }
    queues_.clear();
  }

  std::shared_ptr<Communicator> peers_;
  std::map<c10::DeviceIndex, Stream> queues_;
  std::optional<Together> together_;
  bool closed_ = false;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> collectives_over(const c10::intrusive_ptr<c10d::Backend>& host) {
  return c10::make_intrusive<Backend>(host);
}

int64_t communicators() {
  return count;
}

} // namespace toy
