// What a backend and its queued collectives share, which may outlive it: the peers, and whether they were given up.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace toy {

using Started = c10::intrusive_ptr<c10d::Work>;

// A collective in two halves: what begins it, and what puts its results into the memory of the device.
struct Collective {
  std::function<Started()> begin;
  std::function<void()> end;
  bool message = false; // sent or received: of these gloo makes no future
};

class Communicator {
 public:
  explicit Communicator(c10::intrusive_ptr<c10d::Backend> host);
  ~Communicator();

  // Runs in the thread of a queue: begins all, so that none waits for another of them, then ends them one by one. Once the
  // communicator is aborted it returns at once and leaves in the memory whatever is there.
  void run(const std::vector<Collective>& collectives);

  void abort();
  bool aborted() const;

  c10::intrusive_ptr<c10d::Backend> host;

 private:
  bool finish(const Started& work, bool message);
  void finish_message(const Started& work);
  void finish_future(const Started& work);

  // Apart from the rest, because gloo's threads hold it: the last one to let go of gloo must not be a thread of gloo.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool aborted = false;
    std::set<Started> messages;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

} // namespace toy
