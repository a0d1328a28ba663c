// The names that Python needs.
#include "collectives.h"
#include "memory.h"
#include "random.h"

#include <torch/csrc/utils/pybind.h>

#include <thread>

namespace {

c10::DeviceIndex index(int given) {
  return static_cast<c10::DeviceIndex>(given);
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  toy::register_allocator();
  module.attr("capacity") = toy::kCapacity;
  module.attr("visible") = toy::limits().visible;
  module.attr("uuid") = toy::limits().uuid;
  module.def("current_device", [] { return static_cast<int>(toy::current_device()); });
  module.def("set_device", [](int device) { toy::set_device(index(device)); });
  module.def("default_generator", [](int device) { return toy::default_generator(index(device)); });

  module.def("waits", [] { return toy::waits(); });
  module.def("forget_waits", [] { toy::forget_waits(); });
  module.def("refuse_waits", [](bool refused) { toy::refuse_waits(refused); });
  module.def("hold", [] { toy::hold(); });
  module.def("release", [] { toy::release(); });
  module.def("queued", [](int device) { return toy::current_queue(index(device))->length(); });
  module.def("sleep", [](int device, double seconds) {
    toy::current_queue(index(device))->add([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
  module.def("forked", [] { return toy::forked(); });
  module.def("stop", [](double seconds) {
    toy::stop_queues(std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
  });

  module.def("over", &toy::collectives_over);
  module.def("communicators", &toy::communicators);
}
