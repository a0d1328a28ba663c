#include "queue.h"

#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <iostream>
#include <thread>
#include <vector>

namespace toy {

namespace {

constexpr c10::StreamId kPool = 32; // streams that torch hands out; as on CUDA the 33rd is the first again

// All of this stays until the process ends: threads may look at it to the last, so nothing here is ever destroyed.
struct Everything {
  std::mutex mutex;
  std::array<std::map<c10::StreamId, Stream>, kMost> queues;
  std::array<c10::StreamId, kMost> pooled{};
  c10::StreamId next = kPool + 1;

  std::mutex waits_mutex;
  std::map<std::pair<std::string, int64_t>, int64_t> waits;
  std::atomic<bool> refused{false};

  std::mutex errors_mutex;
  std::array<std::exception_ptr, kMost> errors;

  std::mutex gate_mutex;
  std::condition_variable gate;
  bool held = false;
};

Everything& everything() {
  static auto* all = new Everything;
  return *all;
}

thread_local std::array<c10::StreamId, kMost> current_streams{};

std::atomic<bool> started{false};
std::atomic<bool> in_child{false};

void note_fork() {
  in_child = started.load();
}

Stream find(c10::DeviceIndex device, c10::StreamId id) {
  auto& all = everything();
  const std::lock_guard lock(all.mutex);
  auto& found = all.queues[checked(device)][id];
  if (!found) {
    found = std::make_shared<Queue>(device, id);
  }
  return found;
}

void pass_gate() {
  auto& all = everything();
  std::unique_lock lock(all.gate_mutex);
  all.gate.wait(lock, [&] { return !all.held; });
}

} // namespace

void Mark::reach() {
  const std::lock_guard lock(mutex_);
  when_ = std::chrono::steady_clock::now();
  reached_ = true;
  changed_.notify_all();
}

bool Mark::reached() const noexcept {
  return reached_;
}

void Mark::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached(); });
}

bool Mark::wait_for(std::chrono::milliseconds time) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return reached(); });
}

std::chrono::steady_clock::time_point Mark::when() const {
  const std::lock_guard lock(mutex_);
  return when_;
}

void Queue::add(Task task, Full full) {
  check_not_forked();
  if (full == Full::kWait && length() >= limits().length) {
    const WithoutInterpreter without;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.size() < limits().length || closed_; });
  }
  const std::lock_guard lock(mutex_);
  if (full == Full::kIgnore && (dropping_ || (closed_ && !running_))) {
    return; // a mark, or memory that nobody will use again
  }
  TORCH_CHECK(
      !closed_ || full == Full::kIgnore, "A stream of toy:", static_cast<int>(device), " that is closed was given work.");
  tasks_.push_back(std::move(task));
  if (!running_) {
    running_ = true;
    started = true;
    std::thread([this] { work(); }).detach(); // the queue outlives it: nothing ever takes a queue out of the registry
  }
  changed_.notify_all();
}

void Queue::work() {
  at::set_num_threads(1); // the host computes meanwhile
  const at::NoGradGuard no_grad;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !tasks_.empty() || closed_; });
    if (tasks_.empty() || dropping_) {
      break;
    }
    lock.unlock();
    pass_gate();
    lock.lock();
    if (dropping_) {
      break;
    }
    auto task = std::move(tasks_.front());
    lock.unlock();
    try {
      task();
    } catch (...) {
      keep_error(device, std::current_exception());
    }
    task = nullptr; // what it holds is let go before anyone sees that it is done
    lock.lock();
    tasks_.pop_front();
    changed_.notify_all();
  }
  running_ = false;
  changed_.notify_all();
}

Place Queue::mark() {
  auto place = std::make_shared<Mark>();
  {
    const std::lock_guard lock(mutex_);
    if (tasks_.empty() || dropping_ || in_child) {
      place->reach();
      return place;
    }
  }
  add([place] { place->reach(); }, Full::kIgnore);
  return place;
}

void Queue::follow(Place place) {
  if (!place->reached()) {
    add([place = std::move(place)] { place->wait(); });
  }
}

bool Queue::idle() const {
  return length() == 0;
}

size_t Queue::length() const {
  const std::lock_guard lock(mutex_);
  return tasks_.size();
}

void Queue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool Queue::stop(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  const auto ended = [&] { return !running_; };
  if (!changed_.wait_for(lock, time, ended)) {
    dropping_ = true;
    changed_.notify_all();
  }
  return changed_.wait_for(lock, time, ended);
}

Stream current_queue(c10::DeviceIndex device) {
  return find(device, current_streams[checked(device)]);
}

Stream queue_of(const c10::Stream& stream) {
  return find(index_of(stream.device()), stream.id());
}

c10::Stream stream_of(const Queue& queue) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, queue.device), queue.id);
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  auto& id = current_streams[index_of(stream.device())];
  const c10::Stream before(c10::Stream::UNSAFE, c10::Device(kType, index_of(stream.device())), id);
  id = stream.id();
  return before;
}

c10::Stream pooled_stream(c10::DeviceIndex device) {
  auto& all = everything();
  const std::lock_guard lock(all.mutex);
  const auto id = all.pooled[checked(device)]++ % kPool + 1;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

Stream new_queue(c10::DeviceIndex device) {
  c10::StreamId id = 0;
  {
    auto& all = everything();
    const std::lock_guard lock(all.mutex);
    id = all.next++;
  }
  return find(device, id);
}

void count_wait(const std::string& reason) {
  auto& all = everything();
  const bool asked = reason.starts_with("synchronize"); // in so many words
  TORCH_CHECK(
      asked || !all.refused,
      "The host waits for a toy device (", reason, "), which torch.toy.set_sync_debug_mode(\"error\") refuses.");
  const std::lock_guard lock(all.waits_mutex);
  ++all.waits[{reason, static_cast<int64_t>(syscall(SYS_gettid))}];
}

std::map<std::pair<std::string, int64_t>, int64_t> waits() {
  auto& all = everything();
  const std::lock_guard lock(all.waits_mutex);
  return all.waits;
}

void forget_waits() {
  auto& all = everything();
  const std::lock_guard lock(all.waits_mutex);
  all.waits.clear();
}

void refuse_waits(bool refused) {
  everything().refused = refused;
}

void keep_error(c10::DeviceIndex device, std::exception_ptr error) {
  auto& all = everything();
  const std::lock_guard lock(all.errors_mutex);
  if (!all.errors[device]) { // the first one is the cause
    all.errors[device] = std::move(error);
  }
}

void raise_errors(c10::DeviceIndex device) {
  auto& all = everything();
  std::exception_ptr found;
  {
    const std::lock_guard lock(all.errors_mutex);
    std::swap(found, all.errors[device]);
  }
  if (found) {
    std::rethrow_exception(found);
  }
}

void finish(const Place& place, c10::DeviceIndex device) {
  {
    const WithoutInterpreter without;
    place->wait();
  }
  raise_errors(device);
}

void wait_for(const Place& place, c10::DeviceIndex device, const std::string& reason) {
  count_wait(reason);
  finish(place, device);
}

void wait_for(const Stream& queue, const std::string& reason) {
  wait_for(queue->mark(), queue->device, reason);
}

void wait_for_device(c10::DeviceIndex device, const std::string& reason) {
  count_wait(reason);
  std::vector<Stream> found;
  {
    auto& all = everything();
    const std::lock_guard lock(all.mutex);
    for (const auto& [id, queue] : all.queues[checked(device)]) {
      found.push_back(queue);
    }
  }
  {
    const WithoutInterpreter without;
    std::vector<Place> places;
    for (const auto& queue : found) {
      places.push_back(queue->mark());
    }
    for (const auto& place : places) {
      place->wait();
    }
  }
  raise_errors(device);
}

void hold() {
  auto& all = everything();
  const std::lock_guard lock(all.gate_mutex);
  all.held = true;
}

void release() {
  auto& all = everything();
  const std::lock_guard lock(all.gate_mutex);
  all.held = false;
  all.gate.notify_all();
}

bool forked() noexcept {
  return in_child;
}

void check_not_forked() {
  static const int registered = pthread_atfork(nullptr, nullptr, &note_fork);
  (void)registered;
  TORCH_CHECK(
      !in_child,
      "A toy device was used in a process that was forked from one that had used it, too. The threads of its streams are "
      "not here. Start the process with \"spawn\" or \"forkserver\".");
}

void stop_queues(std::chrono::milliseconds time) {
  if (in_child) {
    return;
  }
  auto& all = everything();
  release();
  std::vector<Stream> found;
  {
    const std::lock_guard lock(all.mutex);
    for (const auto& queues : all.queues) {
      for (const auto& [id, queue] : queues) {
        found.push_back(queue);
      }
    }
  }
  const WithoutInterpreter without;
  const auto end = std::chrono::steady_clock::now() + time;
  for (const auto& queue : found) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    queue->stop(std::max(left, std::chrono::milliseconds(10)));
  }
  for (const auto& error : all.errors) {
    if (error) {
      try {
        std::rethrow_exception(error);
      } catch (const std::exception& unseen) {
        const std::string text = unseen.what(); // the first line of it: torch adds where in C++ it was raised
        std::cerr << "accel-toydevice: the process ends, and nothing waited for this error of a kernel: "
                  << text.substr(0, text.find('\n'))
                  << std::endl;
      }
    }
  }
}

WithoutInterpreter::WithoutInterpreter() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}

WithoutInterpreter::~WithoutInterpreter() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

} // namespace toy
