#include "tensor.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace conv2d_ext::fuzz {

// ---- numbers --------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kMostElements = int64_t{1} << 22;

// One real number, or part of a complex one.
double draw(const Format& format, Values values, Random& random) {
  const double sign = (random.next() & 1) != 0 ? -1.0 : 1.0;
  const auto of_magnitude = [&](int64_t low, int64_t high) {
    const int64_t exponent = low + random.below(high - low + 1);
    return sign * std::ldexp(1.0 + random.unit(), int(exponent));
  };
  // Of which the product of two underflows in float32 or float64; of float16 the result does.
  const int64_t least_denormal = format.least - format.fraction;
  switch (values) {
    case Values::kNormal:
      return 2.0 * random.unit() - 1.0;
    case Values::kPositive:
      return random.unit();
    case Values::kRectified:
      return sign < 0 ? 0.0 : random.unit();
    case Values::kSmallWhole:
      return double(random.below(9) - 4);
    case Values::kZeros:
      return random.below(8) == 0 ? sign : sign * 0.0;
    case Values::kDenormal:
      return sign * std::ldexp(double(random.next() >> (64 - 1 - random.below(format.fraction))), int(least_denormal));
    case Values::kUnderflowing:
      if (format.fraction == 10) return of_magnitude(-24, -8);
      return format.bytes == 8 ? of_magnitude(-541, -507) : of_magnitude(-78, -60);
    case Values::kOverflowing:
      return of_magnitude(format.most / 2 - 4, format.most);
    case Values::kWild:
      return of_magnitude(least_denormal, format.most);
    case Values::kInfinite:
      return random.below(16) == 0 ? sign * std::numeric_limits<double>::infinity() : 2.0 * random.unit() - 1.0;
    case Values::kNaN:
      if (random.below(16) == 0) return std::copysign(std::numeric_limits<double>::quiet_NaN(), sign);
      return random.below(32) == 0 ? sign * std::numeric_limits<double>::infinity() : 2.0 * random.unit() - 1.0;
    case Values::kLeastNormal:
      return of_magnitude(format.least - 2, format.least + 2);
  }
  return 0.0;
}

uint64_t draw_integer(Values values, Random& random) {
  switch (values) {
    case Values::kSmallWhole:
      return uint64_t(random.below(9) - 4);
    case Values::kZeros:
      return uint64_t(random.below(8) == 0);
    case Values::kOverflowing:  // around the largest and the least of each width
      return (random.next() & 1) != 0 ? 0x7f7f7fff7fff7fffu : 0x8080800080008000u;
    default:
      return random.next();
  }
}

// Windows: element w of dimension `outer` begins w * step elements of dimension `inner` after the first one.
struct Windows {
  size_t inner, outer;
  int64_t step;  // 0: there are none
};
Windows windows_of(const Sizes& size, const Layout& layout) {
  const size_t inner = size_t(kOrder[layout.order][3]), outer = size_t(kOrder[layout.order][2]);
  const bool repeats = (layout.expanded >> inner & 1) != 0 || (layout.expanded >> outer & 1) != 0;
  // Images are drawn apart (take_images).
  if (layout.windows == 0 || repeats || inner == 0 || outer == 0 || size[inner] < 2 || size[outer] < 2)
    return {0, 0, 0};
  return {inner, outer, std::max<int64_t>(1, size[inner] / (layout.windows + 1))};
}
int64_t elements_of(const Windows& windows, const Sizes& size) {
  return (size[windows.outer] - 1) * windows.step + size[windows.inner];
}

Sizes steps_of(const Sizes& stored, const Layout& layout, const Windows& windows) {
  Sizes step{};
  int64_t next = 1;
  for (int d = 3; d >= 0; --d) {
    step[size_t(d)] = (layout.expanded >> d & 1) != 0 ? 0 : next;
    next *= stored[size_t(d)];
  }
  if (windows.step != 0) step[windows.outer] = windows.step * step[windows.inner];
  return step;
}

}  // namespace

bool stored_size(const Sizes& size, const Layout& layout, Sizes& stored) {
  const Windows windows = windows_of(size, layout);
  int64_t count = 1;
  for (size_t d = 0; d < 4; ++d) {
    stored[d] = (layout.expanded >> d & 1) != 0 && size[d] > 1 ? 1 : size[d];
    if (windows.step != 0 && d == windows.inner) stored[d] = elements_of(windows, size);
    if (windows.step != 0 && d == windows.outer) stored[d] = 1;
    if (__builtin_mul_overflow(count, stored[d], &count) || count > kMostElements) return false;
  }
  return true;
}

Numbers draw_numbers(DType dtype, const Sizes& size, const Layout& layout, Values values, uint64_t seed) {
  Numbers numbers{dtype, size, {}, {}};
  Sizes stored{};
  stored_size(size, layout, stored);
  numbers.step = steps_of(stored, layout, windows_of(size, layout));
  const int64_t count = elements_of(stored), item = size_of(dtype);
  numbers.bytes.resize(size_t(count * item));
  Random random(seed);
  uint8_t* at = numbers.bytes.data();
  if (is_integer(dtype)) {
    for (int64_t i = 0; i < count; ++i, at += item) {
      const uint64_t value = draw_integer(values, random);
      std::memcpy(at, &value, size_t(item));
    }
    return numbers;
  }
  const Format& format = storage_format(dtype);
  for (int64_t i = 0, parts = count * item / format.bytes; i < parts; ++i, at += format.bytes) {
    encode(format, draw(format, values, random), at);
  }
  return numbers;
}

Numbers take_images(const Numbers& numbers, const std::vector<int64_t>& images) {
  Numbers taken{numbers.dtype, numbers.size, numbers.step, {}};
  taken.size[0] = int64_t(images.size());
  if (numbers.step[0] == 0) {
    taken.bytes = numbers.bytes;
    return taken;
  }
  const int64_t image = numbers.step[0] * size_of(numbers.dtype);
  for (const int64_t n : images) {
    taken.bytes.insert(taken.bytes.end(), numbers.bytes.begin() + n * image, numbers.bytes.begin() + (n + 1) * image);
  }
  return taken;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

namespace {

constexpr int64_t kFarElements = (int64_t{1} << 31) + 64, kFarBytes = int64_t{1} << 36;

// Address space for tensors whose elements lie far apart; few of its pages are ever touched.
class FarMemory {
 public:
  uint8_t* take() {
    for (int i = 0; i < kRegions; ++i) {
      if (taken_[i]) continue;
      if (region_[i] == nullptr) {
        void* const memory = mmap(nullptr, size_t(kFarBytes), PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        region_[i] = static_cast<uint8_t*>(memory);
      }
      taken_[i] = true;
      return region_[i];
    }
    return nullptr;
  }
  void give_back(uint8_t* memory) {
    for (int i = 0; i < kRegions; ++i) {
      if (region_[i] != memory) continue;
      madvise(memory, size_t(kFarBytes), MADV_DONTNEED);
      taken_[i] = false;
    }
  }

 private:
  static constexpr int kRegions = 6;
  uint8_t* region_[kRegions] = {};
  bool taken_[kRegions] = {};
};
FarMemory far_memory;

// Strides, and the elements from the first to the last; false where these are too many.
bool strides_of(const Sizes& size, const Layout& layout, Sizes& stride, int64_t& span, bool& far) {
  int64_t step = 1;
  const int* const order = kOrder[layout.order];
  const Windows windows = windows_of(size, layout);
  span = 1;
  far = false;
  for (int at = 3; at >= 0; --at) {
    const size_t d = size_t(order[at]);
    if ((layout.expanded >> d & 1) != 0) {
      stride[d] = 0;
      continue;
    }
    const bool shares = windows.step != 0 && d == windows.outer;
    const int64_t apart = (layout.slice[d] & 4) != 0 && !shares ? 2 : 1, gap = layout.slice[d] & 3;
    stride[d] = shares ? windows.step * stride[windows.inner] : step * apart;
    if (layout.far != 0 && at == 0 && size[d] == 2) {
      stride[d] += kFarElements;
      far = true;
    }
    if (size[d] > 1) {
      int64_t reach = 0;
      if (__builtin_mul_overflow(size[d] - 1, stride[d], &reach) || __builtin_add_overflow(span, reach, &span)) {
        return false;
      }
    }
    const bool too_many = shares
                              ? __builtin_mul_overflow(stride[windows.inner], elements_of(windows, size) + gap, &step)
                              : __builtin_mul_overflow(step, size[d] * apart + gap, &step);
    if (too_many) return false;
    if (step == 0) step = 1;
    if (size[d] == 1 && layout.single > 0) stride[d] = kSingleStrides[layout.single];
  }
  return far || span <= 4 * kMostElements;
}

}  // namespace

bool Tensor::fits(DType dtype, const Sizes& size, const Layout& layout) {
  Sizes stride{};
  int64_t span = 0;
  bool far = false;
  return strides_of(size, layout, stride, span, far) && (!far || span < kFarBytes / size_of(dtype) - 4096);
}

void Tensor::allocate(DType dtype, const Sizes& size, const Layout& layout, uint8_t filling, int64_t margin) {
  dtype_ = dtype;
  size_ = size;
  filling_ = filling;
  int64_t span = 0;
  strides_of(size, layout, stride_, span, far_);
  if (size[0] == 0 || size[1] == 0 || size[2] == 0 || size[3] == 0) {
    far_ = false;
    return;  // torch has no address for these either
  }
  const int64_t item = size_of(dtype);
  if (far_) {
    memory_ = far_memory.take();
    if (memory_ == nullptr) {
      far_ = false;
      Layout near = layout;
      near.far = 0;
      strides_of(size, near, stride_, span, far_);
    }
  }
  if (!far_) {
    bytes_ = 2 * margin + (layout.offset + span) * item;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, size_t(bytes_)) != 0) std::abort();
    memory_ = static_cast<uint8_t*>(memory);
    std::memset(memory_, filling, size_t(bytes_));
  }
  first_ = memory_ + margin + layout.offset * item;
}

Tensor::~Tensor() {
  if (far_) {
    far_memory.give_back(memory_);
  } else {
    std::free(memory_);
  }
}

// As many bytes as an element has; sizes that the compiler knows cost next to nothing.
void copy_element(uint8_t* to, const uint8_t* from, int64_t size) {
  switch (size) {
    case 1:
      *to = *from;
      return;
    case 2:
      std::memcpy(to, from, 2);
      return;
    case 4:
      std::memcpy(to, from, 4);
      return;
    case 8:
      std::memcpy(to, from, 8);
      return;
    default:
      std::memcpy(to, from, 16);
  }
}

// Calls visit(address, index in the order of the dimensions, coordinates).
template <class Visit>
void Tensor::for_each(Visit visit) const {
  if (memory_ == nullptr) return;
  const int64_t item = size_of(dtype_);
  int64_t index = 0;
  for (int64_t i = 0; i < size_[0]; ++i) {
    for (int64_t j = 0; j < size_[1]; ++j) {
      for (int64_t k = 0; k < size_[2]; ++k) {
        uint8_t* const row = first_ + (i * stride_[0] + j * stride_[1] + k * stride_[2]) * item;
        for (int64_t l = 0; l < size_[3]; ++l) visit(row + l * stride_[3] * item, index++, i, j, k, l);
      }
    }
  }
}

Tensor::Tensor(const Numbers& numbers, const Layout& layout) {
  allocate(numbers.dtype, numbers.size, layout, 0xff, 0);
  // Along dimensions that are expanded the first is all there is.
  const Sizes whole = size_;
  for (size_t d = 0; d < 4; ++d) {
    if (stride_[d] == 0 && size_[d] > 1) size_[d] = 1;
  }
  const int64_t item = size_of(dtype_);
  for_each([&](uint8_t* to, int64_t, int64_t i, int64_t j, int64_t k, int64_t l) {
    copy_element(to, numbers.at(i, j, k, l), item);
  });
  size_ = whole;
}

Tensor::Tensor(DType dtype, const Sizes& size, const Layout& layout, uint8_t filling) {
  allocate(dtype, size, layout, filling, 64);
  if (!far_) return;
  for_each([&](uint8_t* to, int64_t, int64_t, int64_t, int64_t, int64_t) {
    std::memset(to, filling, size_t(size_of(dtype_)));
  });
}

std::vector<uint8_t> Tensor::take(bool& others_untouched) {
  const int64_t item = size_of(dtype_);
  std::vector<uint8_t> numbers(size_t(elements_of(size_) * item));
  const std::vector<uint8_t> filling(16, filling_);
  for_each([&](uint8_t* from, int64_t index, int64_t, int64_t, int64_t, int64_t) {
    copy_element(numbers.data() + index * item, from, item);
    copy_element(from, filling.data(), item);
  });
  others_untouched = true;
  if (!far_) {
    for (int64_t i = 0; i < bytes_; ++i) others_untouched = others_untouched && memory_[i] == filling_;
  }
  return numbers;
}

}  // namespace conv2d_ext::fuzz
