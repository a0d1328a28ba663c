#include "random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>

namespace toy {

namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index) : Generator(index, at::detail::createCPUGenerator()) {}

  Generator(c10::DeviceIndex index, at::Generator given)
      : GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(given)) {}

  // The host knows the seed, and what is queued has been given its place: nothing to wait for.
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    enqueue(current_queue(device().index()), [host = host, seed]() mutable { host.set_current_seed(seed); });
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    const auto found = c10::detail::getNonDeterministicRandom();
    set_current_seed(found);
    return found;
  }

  void set_offset(uint64_t offset) override {
    settle();
    host.set_offset(offset);
  }
  uint64_t get_offset() const override {
    settle();
    return host.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    settle();
    host.unsafeGetGeneratorImpl()->set_state(state);
    seed_ = host.current_seed();
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    settle();
    return host.unsafeGetGeneratorImpl()->get_state();
  }

  void enqueue(const Stream& queue, Task task) {
    const std::lock_guard lock(order_);
    if (last_) {
      queue->follow(last_);
    }
    queue->add(std::move(task));
    last_ = queue->mark();
  }

  at::Generator host;

 private:
  // What is queued has to be drawn before the state says where the numbers stand.
  void settle() const {
    Place last;
    {
      const WithoutInterpreter without; // a draw holds the lock while it waits for room
      const std::lock_guard lock(order_);
      last = last_;
    }
    if (last && !last->reached()) {
      wait_for(last, device().index(), "random state");
    }
  }

  Generator* clone_impl() const override {
    settle();
    return new Generator(device().index(), host.clone());
  }

  mutable std::mutex order_;
  Place last_;
  uint64_t seed_ = c10::default_rng_seed_val;
};

Generator& of(const at::Generator& generator) {
  return *static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
}

} // namespace

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* generators = new std::array<at::Generator, kMost>{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*generators)[index < 0 ? current_device() : checked(index)];
}

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Generator>(index < 0 ? current_device() : checked(index));
}

void enqueue_draw(const at::Generator& generator, const Stream& queue, Task task) {
  of(generator).enqueue(queue, std::move(task));
}

at::Generator host_generator(const at::Generator& generator) {
  return of(generator).host;
}

} // namespace toy
