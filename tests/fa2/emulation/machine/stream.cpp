// The order of launches: one after the other, unless a kernel may start early (programmatic stream
// serialisation).
#include <utility>

#include "machine.h"

namespace fa2::emulation {
namespace {

struct Launch {
  std::function<void()> run;
  bool early;
};
std::vector<Launch> launches;        // that have not run
std::function<void()> run_previous;  // of the kernel that runs, if that has not run yet

void run_last() {
  if (launches.empty()) return;
  const Launch launch = std::move(launches.back());
  launches.pop_back();
  if (!launch.early) {
    run_last();
    launch.run();
    return;
  }
  auto outer = std::exchange(run_previous, run_last);
  launch.run();
  if (run_previous)
    fail("a kernel that was launched early has not waited for the one before it (griddepcontrol.wait)");
  run_previous = std::move(outer);
}

}  // namespace

void launch_in_order(std::function<void()> run, bool early) {
  if (!early || options.policy == Policy::kEarly) finish_launches();
  launches.push_back({std::move(run), early && options.policy != Policy::kEarly});
}

void finish_launches() {
  try {
    run_last();
  } catch (...) {
    launches.clear();
    run_previous = nullptr;
    throw;
  }
}

void wait_for_previous_launch() {
  if (auto run = std::exchange(run_previous, nullptr)) run();
}

}  // namespace fa2::emulation
