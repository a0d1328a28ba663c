// The devices of this process, and which of them a thread works on.
#include "device.h"

#include <cstdlib>
#include <sstream>
#include <string>

namespace toy {

namespace {

thread_local c10::DeviceIndex current = 0;

bool allowed(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || std::string(value) != "0";
}

std::vector<int> visible_devices() {
  const char* value = std::getenv("TOY_VISIBLE_DEVICES");
  if (value == nullptr) {
    return {0, 1};
  }
  std::vector<int> found;
  std::stringstream parts{std::string(value)};
  for (std::string part; std::getline(parts, part, ',');) {
    TORCH_CHECK(
        part == "0" || part == "1",
        "TOY_VISIBLE_DEVICES is ", value, ", but the devices are 0 and 1. Give one of them, or both: \"0,1\".");
    found.push_back(std::stoi(part));
  }
  return found;
}

size_t queue_length() {
  const char* value = std::getenv("TOY_QUEUE_LENGTH");
  return value == nullptr ? 1024 : std::stoul(value); // about what a CUDA stream takes
}

} // namespace

const Limits& limits() {
  static const Limits found{
      visible_devices(), allowed("TOY_FLOAT64"), allowed("TOY_LATE_COPIES"), allowed("TOY_STATISTICS"),
      allowed("TOY_UUID"), queue_length()};
  return found;
}

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(limits().visible.size());
}

c10::DeviceIndex current_device() noexcept {
  return current;
}

void set_device(c10::DeviceIndex index) {
  current = checked(index);
}

void set_device_unchecked(c10::DeviceIndex index) noexcept {
  current = index;
}

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count(),
      "toy:", static_cast<int>(index), " was asked for, but there are ", static_cast<int>(device_count()),
      " toy devices. Choose an index from 0 to ", device_count() - 1, ".");
  return index;
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? checked(device.index()) : current;
}

} // namespace toy
