// A transposed convolution's sizes and hyper-parameters -> the call of conv2d_grad_input that computes it, or one clear
// error, of F.conv_transpose1d's and F.conv_transpose2d's type and with their phrases.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>

#include "conv2d_checks.h"

namespace conv2d_ext {

// The caller's lists: each of one element for all dimensions, or one for each.
struct ConvTransposeParams {
  c10::SymIntArrayRef stride, padding, output_padding, dilation;
  c10::SymInt groups;
};

// In one dimension the tensors are seen as images of one row.
struct ConvTransposeCall {
  SymConv2dParams params;
  c10::SmallVector<c10::SymInt, 4> output_size;  // (N, O, H', W'), or (O, H', W') of an unbatched input
  // What input lacks for conv2d_grad_input to give output_size: (height, width) of zeros below it and on its right.
  c10::SymInt append[2];
  // What output_size has too much of below and on the right.
  c10::SymInt cut[2];
};

// dims: 1 or 2. input: (N, I, [H,] W) or without N. weight: (I, O/groups, [KH,] KW). bias: (O,) or none.
ConvTransposeCall check_conv_transpose(int64_t dims, c10::SymIntArrayRef input, c10::SymIntArrayRef weight,
                                       std::optional<c10::SymIntArrayRef> bias, const ConvTransposeParams& params);

}  // namespace conv2d_ext
