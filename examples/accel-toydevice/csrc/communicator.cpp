#include "communicator.h"

#include "collectives.h"

namespace toy {

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> host) : host(std::move(host)) {}

Communicator::~Communicator() {
  if (aborted()) {
    host.release(); // its threads may be waiting for a peer that never comes, and its destructor for them
  }
}

bool Communicator::aborted() const {
  const std::lock_guard lock(state_->mutex);
  return state_->aborted;
}

void Communicator::abort() {
  const std::lock_guard lock(state_->mutex);
  state_->aborted = true;
  for (const auto& work : state_->messages) {
    work->abort();
  }
  state_->changed.notify_all();
}

void Communicator::run(const std::vector<Collective>& collectives) {
  try {
    std::vector<Started> begun;
    for (const auto& collective : collectives) {
      if (aborted()) {
        return;
      }
      begun.push_back(collective.begin());
    }
    for (size_t i = 0; i < begun.size(); ++i) {
      if (!finish(begun[i], collectives[i].message)) {
        return;
      }
      collectives[i].end();
    }
  } catch (const std::exception& error) {
    if (aborted()) {
      return;
    }
    abort(); // what one rank has missed the others cannot have: nothing can follow
    C10_THROW_ERROR(DistBackendError, std::string(kCollectives) + ": a collective failed: " + error.what());
  }
}

// Returns whether there are results.
bool Communicator::finish(const Started& work, bool message) {
  message ? finish_message(work) : finish_future(work);
  return !aborted();
}

void Communicator::finish_message(const Started& work) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->aborted) {
      return;
    }
    state_->messages.insert(work);
  }
  const auto forget = [&] {
    const std::lock_guard lock(state_->mutex);
    state_->messages.erase(work);
  };
  try {
    work->wait();
  } catch (...) {
    forget();
    throw;
  }
  forget();
}

void Communicator::finish_future(const Started& work) {
  const auto future = work->getFuture();
  future->addCallback([state = state_](c10::ivalue::Future&) {
    const std::lock_guard lock(state->mutex);
    state->changed.notify_all();
  });
  {
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [&] { return state_->aborted || future->completed(); });
  }
  if (future->completed() && future->hasError()) {
    std::rethrow_exception(future->exception_ptr());
  }
}

} // namespace toy
