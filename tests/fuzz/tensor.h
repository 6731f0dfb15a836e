// Tensors of a case: their numbers in the order of the dimensions, and the same numbers as a layout puts them in
// memory.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "case.h"
#include "numbers.h"

namespace conv2d_ext::fuzz {

using Sizes = std::array<int64_t, 4>;
inline int64_t elements_of(const Sizes& size) { return size[0] * size[1] * size[2] * size[3]; }

// Numbers in the order of the dimensions; along dimensions that are expanded there is one, and windows share theirs.
struct Numbers {
  DType dtype;
  Sizes size, step;  // step: in elements, 0 along expanded dimensions
  std::vector<uint8_t> bytes;

  const uint8_t* at(int64_t i, int64_t j, int64_t k, int64_t l) const {
    return bytes.data() + (i * step[0] + j * step[1] + k * step[2] + l * step[3]) * size_of(dtype);
  }
};

// The stored numbers that a layout leaves of a size; false where these are too many to draw.
bool stored_size(const Sizes& size, const Layout& layout, Sizes& stored);
Numbers draw_numbers(DType dtype, const Sizes& size, const Layout& layout, Values values, uint64_t seed);
// Of image `image` alone, or of images chosen for each of a batch.
Numbers take_images(const Numbers& numbers, const std::vector<int64_t>& images);

// A tensor in memory that ends where its last element does; what lies between its elements is `filling`.
class Tensor {
 public:
  Tensor(const Numbers& numbers, const Layout& layout);                           // an operand
  Tensor(DType dtype, const Sizes& size, const Layout& layout, uint8_t filling);  // a result, all of it filling
  ~Tensor();
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  ConstTensorView view() const { return {first_, {stride_[0], stride_[1], stride_[2], stride_[3]}}; }
  TensorView view() { return {first_, {stride_[0], stride_[1], stride_[2], stride_[3]}}; }

  // The result's numbers; `others_untouched`: whether what lies between and around them is still filling.
  std::vector<uint8_t> take(bool& others_untouched);

  // Whether a layout takes memory that can be had.
  static bool fits(DType dtype, const Sizes& size, const Layout& layout);

 private:
  void allocate(DType dtype, const Sizes& size, const Layout& layout, uint8_t filling, int64_t margin);
  template <class Visit>
  void for_each(Visit visit) const;

  DType dtype_;
  Sizes size_{}, stride_{};
  uint8_t filling_ = 0;
  uint8_t* memory_ = nullptr;
  int64_t bytes_ = 0;
  uint8_t* first_ = nullptr;
  bool far_ = false;
};

}  // namespace conv2d_ext::fuzz
