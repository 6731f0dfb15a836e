#include "call.h"

#include <utility>

namespace conv2d_ext::cpu {

Call product_call(MatmulSizes size, DType dtype, ConstMatrixView mat1, ConstMatrixView mat2, Bias bias,
                  MatrixView result) {
  if (size.m == 1) {
    mat1.row_stride = mat1.batch_stride;
    result.row_stride = result.batch_stride;
  }
  // The rows of a batch that follow one another are those of one matrix.
  if (mat1.batch_stride == saturating_mul(size.m, mat1.row_stride) &&
      result.batch_stride == saturating_mul(size.m, result.row_stride)) {
    size.m *= size.batch;
    size.batch = 1;
  }
  Conv2dProblem p{};
  p.batch = size.batch;
  p.in_channels = size.k;
  p.out_channels = size.n;
  p.in_w = p.out_w = size.m;
  p.in_h = p.out_h = p.kernel_h = p.kernel_w = p.stride_h = p.stride_w = p.dilation_h = p.dilation_w = p.groups = 1;
  Call call{Direction::kForward, p, dtype, {}, {}, {}, bias};
  call.is_matmul = true;
  call.a = {mat1.data, {mat1.batch_stride, mat1.col_stride, 0, mat1.row_stride}};
  call.b = {mat2.data, {mat2.col_stride, mat2.row_stride, 0, 0}};
  call.result = {result.data, {result.batch_stride, result.col_stride, 0, result.row_stride}};
  return call;
}

namespace {

void drop_unused_strides(int64_t (&stride)[4], const TensorSizes& size) {
  drop_unused_step(size.batch, stride[0]);
  drop_unused_step(size.channels, stride[1]);
  drop_unused_step(size.height, stride[2]);
  drop_unused_step(size.width, stride[3]);
}

}  // namespace

void drop_unused_step(int64_t size, int64_t& step, int64_t harmless) {
  constexpr int64_t kLongest = int64_t{1} << 40;
  if (size <= 1 && (step > kLongest || step < -kLongest)) step = harmless;
}

Call transposed(const Call& call) {
  Call other = call;
  Conv2dProblem& p = other.problem;
  std::swap(p.in_channels, p.out_channels);
  std::swap(other.a, other.b);
  std::swap(other.result.stride[0], other.result.stride[1]);
  // Of the input only the pixels that the tap meets are left.
  other.a.stride[2] = saturating_mul(other.a.stride[2], p.stride_h);
  other.a.stride[3] = saturating_mul(other.a.stride[3], p.stride_w);
  p.in_h = p.out_h;
  p.in_w = p.out_w;
  p.stride_h = p.stride_w = 1;
  return other;
}

bool is_empty(const Call& call) {
  const Conv2dProblem& p = call.problem;
  switch (call.direction) {
    case Direction::kForward:
      return p.batch == 0 || p.out_channels == 0 || p.out_pixels() == 0;
    case Direction::kGradInput:
      return p.batch == 0 || p.in_channels == 0 || p.in_h == 0 || p.in_w == 0;
    default:
      return p.out_channels == 0 || p.in_channels == 0 || p.taps() == 0;
  }
}

void normalize(Call& call) {
  Conv2dProblem& p = call.problem;
  p = with_bounded_strides(p);
  const bool forward = call.direction == Direction::kForward, grad_weight = call.direction == Direction::kGradWeight;
  int64_t (&input)[4] = forward ? call.a.stride : grad_weight ? call.b.stride : call.result.stride;
  int64_t (&weight)[4] = grad_weight ? call.result.stride : call.b.stride;
  int64_t (&output)[4] = forward ? call.result.stride : call.a.stride;
  drop_unused_strides(input, {p.batch, p.in_channels, p.in_h, p.in_w});
  drop_unused_strides(weight, {p.out_channels, p.in_channels_per_group(), p.kernel_h, p.kernel_w});
  drop_unused_strides(output, {p.batch, p.out_channels, p.out_h, p.out_w});
  if (!grad_weight) return;
  // One output position takes no step.
  if (p.out_h == 1) p.stride_h = 1;
  if (p.out_w == 1) p.stride_w = 1;
}

}  // namespace conv2d_ext::cpu
