// The queue of a stream: a thread that does what the host has asked for, in order, while the host goes on.
#pragma once

#include "device.h"

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace toy {

using Task = std::function<void()>;

// A place in a queue, which its thread reaches once. Streams wait for marks of other streams; events are made of them.
class Mark {
 public:
  void reach();
  bool reached() const noexcept;
  // Blocks the calling thread. With a time, at most that long; returns whether it was reached.
  void wait() const;
  bool wait_for(std::chrono::milliseconds time) const;
  std::chrono::steady_clock::time_point when() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::chrono::steady_clock::time_point when_;
  std::atomic<bool> reached_{false};
};

using Place = std::shared_ptr<Mark>;

class Queue {
 public:
  enum class Full { kWait, kIgnore }; // what the host does if there is no more room

  Queue(c10::DeviceIndex device, c10::StreamId id) : device(device), id(id) {}

  // What throws is kept, and raised by the next wait of the host for anything on this device.
  void add(Task task, Full full = Full::kWait);
  Place mark();
  void follow(Place place); // what is added from now on begins after it
  bool idle() const;
  size_t length() const;

  // Does what is queued, and ends the thread: no more can be added.
  void close();

  // At the end of the process: drops what is queued, after `time` at the latest. Returns whether the thread has ended.
  bool stop(std::chrono::milliseconds time);

  const c10::DeviceIndex device;
  const c10::StreamId id;

 private:
  void work();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool running_ = false;
  bool closed_ = false;
  bool dropping_ = false;
};

using Stream = std::shared_ptr<Queue>;

Stream current_queue(c10::DeviceIndex device);
Stream queue_of(const c10::Stream& stream);
c10::Stream stream_of(const Queue& queue);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream pooled_stream(c10::DeviceIndex device);
Stream new_queue(c10::DeviceIndex device); // outside of the pool, for whoever closes it again

// The host waits, which is counted under the reason, and what went wrong in a queue of the device is raised.
void wait_for(const Place& place, c10::DeviceIndex device, const std::string& reason);
void wait_for(const Stream& queue, const std::string& reason);
void wait_for_device(c10::DeviceIndex device, const std::string& reason);

// The two halves of it, for who enqueues between them what must not be left behind if waiting is refused.
void count_wait(const std::string& reason);
void finish(const Place& place, c10::DeviceIndex device);
std::map<std::pair<std::string, int64_t>, int64_t> waits(); // (reason, thread of the system) -> how often
void forget_waits();
void refuse_waits(bool refused);

void keep_error(c10::DeviceIndex device, std::exception_ptr error);
void raise_errors(c10::DeviceIndex device);

// While they are held no queue begins anything new.
void hold();
void release();

// Whether this process is a child of one that had queues: their threads are not here.
bool forked() noexcept;
void check_not_forked();

void stop_queues(std::chrono::milliseconds time);

// Lets other Python threads run while this one waits, whether it holds the lock of the interpreter or not.
class WithoutInterpreter {
 public:
  WithoutInterpreter();
  ~WithoutInterpreter();
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void* state_;
};

} // namespace toy
