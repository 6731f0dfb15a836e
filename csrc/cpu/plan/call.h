// A call of one direction: what is planned, and run or explained. Planning reads no data.
#pragma once

#include "../../conv2d_problem.h"
#include "../../tensor_view.h"
#include "../base/integers.h"

namespace conv2d_ext::cpu {

enum class Direction : int { kForward, kGradInput, kGradWeight };

// out_channels elements, `stride` apart. No data: no bias.
struct Bias {
  const void* data;
  int64_t stride;
};

// What `result` is, of the operands a and b:
//
//   forward      output, of input and weight (conv2d_problem.h)
//   grad_input   of grad_output and weight: grad_input[n, ic, ih, iw] = sum over (oc, kh, kw) with
//                rows().source(oh, kh) == ih and cols().source(ow, kw) == iw of
//                    grad_output[n, oc, oh, ow] * conj(weight[oc, ic, kh, kw])
//   grad_weight  of grad_output and input: grad_weight[oc, ic, kh, kw] = sum over (n, oh, ow) of
//                    grad_output[n, oc, oh, ow] * conj(input[n, ic, rows().source(oh, kh), cols().source(ow, kw)])
struct Call {
  Direction direction;
  Conv2dProblem problem;
  DType dtype;
  ConstTensorView a, b;
  TensorView result;
  Bias bias{};                  // of a forward
  bool allow_winograd = false;  // Winograd's F(2 x 2, 3 x 3) where it applies: other bits, and another error
  // A forward that multiplies matrices: the pixels of one row are the rows of mat1, its channels run along k.
  bool is_matmul = false;
};

// What lies so many elements behind `data`. Nothing lies behind nullptr.
inline const void* behind(const void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<const char*>(data) + elements * size_of(dtype);
}
inline void* behind(void* data, int64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + elements * size_of(dtype);
}

// The product of a batch of matrices with one mat2 (its batch_stride is 0, or there is no other), as a call.
Call product_call(MatmulSizes size, DType dtype, ConstMatrixView mat1, ConstMatrixView mat2, Bias bias,
                  MatrixView result);

// Whether the threads share a batch of products out, or else each product among them.
inline bool shares_products(const MatmulSizes& size, const ConstMatrixView& mat2, int num_threads) {
  return size.batch > 1 && mat2.batch_stride != 0 && size.batch >= num_threads;
}

// Whether a pixel has several groups of channels that take a cache line or less of the one tensor and of the other.
inline bool groups_are_narrow(int64_t groups, int64_t channels, int64_t other_channels, int64_t element_size) {
  return groups > 1 && max64(channels, other_channels) <= 64 / element_size;
}

// Whether a weight gradient's operands are both channels_last, or the like.
inline bool channels_are_neighbours(const Call& call) { return call.a.stride[1] == 1 && call.b.stride[1] == 1; }

// Whether its groups are narrow, too: many share a page.
inline bool weight_groups_are_neighbours(const Call& call, int64_t element_size) {
  const Conv2dProblem& p = call.problem;
  return channels_are_neighbours(call) &&
         groups_are_narrow(p.groups, p.in_channels_per_group(), p.out_channels_per_group(), element_size);
}

// A weight gradient of one group and tap without padding, with input and grad_output in each other's place: the same
// products, summed in the same order, and the result's transpose.
Call transposed(const Call& call);

// Whether there is nothing to write.
bool is_empty(const Call& call);

// Replaces strides that no element uses, whose products could overflow, by harmless ones. To be called once, before a
// call is planned.
void normalize(Call& call);

// A step along a dimension of one element is never taken. Where it is huge its products overflow: it gets a harmless
// value. No step that is taken is as long, since the memory it would span is not there.
void drop_unused_step(int64_t size, int64_t& step, int64_t harmless = 0);

}  // namespace conv2d_ext::cpu
