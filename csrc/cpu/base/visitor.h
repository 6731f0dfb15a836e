// What a walk calls with everything that it finds.
#pragma once

namespace conv2d_ext::cpu {

// Stands for a callable that outlives the walk, so that a walk need not be a template.
template <class Found>
class Visitor {
 public:
  template <class Visit>
  Visitor(const Visit& visit)  // NOLINT(google-explicit-constructor): for callers to pass a lambda
      : visit_(&visit),
        call_([](const void* visit, const Found& found) { (*static_cast<const Visit*>(visit))(found); }) {}
  void operator()(const Found& found) const { call_(visit_, found); }

 private:
  const void* visit_;
  void (*call_)(const void* visit, const Found& found);
};

}  // namespace conv2d_ext::cpu
