// A C++ program without Python: convolutions whose bits do not depend on the batch.
//
// It exits with 0 where every image has the same bits alone and in the batch, through this library's functions and
// through torch's own under the mode, and where a gradient is right.
#include <ATen/ATen.h>
#include <conv2d_ext/conv2d_ext.h>

#include <cstdio>

namespace {

bool holds(const char* what, bool is_true) {
  std::printf("%s %s\n", is_true ? "holds" : "FAILS", what);
  return is_true;
}

// A small network of torch's own calls.
at::Tensor network(const at::Tensor& images, const at::Tensor& weight, const at::Tensor& head) {
  const at::Tensor features = at::relu(at::conv2d(images, weight, {}, /*stride=*/1, /*padding=*/1));
  return at::linear(features.mean({2, 3}), head);
}

bool is_close(const at::Tensor& ours, const at::Tensor& theirs) { return at::allclose(ours, theirs, 1e-4, 1e-4); }

bool other_functions_hold() {
  namespace ours = conv2d_ext;
  const at::Tensor rows = at::randn({2, 6, 20});
  const at::Tensor maps = at::randn({2, 6, 9, 8});
  const at::Tensor bias = at::randn({4});
  const at::Tensor kernel1d = at::randn({4, 3, 3});
  const at::Tensor kernel2d = at::randn({4, 3, 3, 2});
  const at::Tensor into1d = at::randn({6, 2, 3});
  const at::Tensor into2d = at::randn({6, 2, 3, 2});
  const at::Tensor matrix = at::randn({4, 8});
  bool all = is_close(ours::conv1d(rows, kernel1d, bias, /*stride=*/2, /*padding=*/1, /*dilation=*/2, /*groups=*/2),
                      at::conv1d(rows, kernel1d, bias, 2, 1, 2, 2));
  all &= is_close(ours::conv1d(rows, kernel1d, bias, 1, /*padding=*/{2, 0}, 1, 2),
                  at::conv1d(at::constant_pad_nd(rows, {2, 0}), kernel1d, bias, 1, at::IntArrayRef(0), 1, 2));
  all &= is_close(
      ours::conv2d(maps, kernel2d, bias, {2, 1}, /*padding=*/{1, 2, 0, 3}, {1, 2}, 2),
      at::conv2d(at::constant_pad_nd(maps, {0, 3, 1, 2}), kernel2d, bias, {2, 1}, at::IntArrayRef({0, 0}), {1, 2}, 2));
  all &= is_close(ours::conv_transpose1d(rows, into1d, bias, 2, 1, /*output_padding=*/1, /*groups=*/2, /*dilation=*/2),
                  at::conv_transpose1d(rows, into1d, bias, 2, 1, 1, 2, 2));
  all &= is_close(ours::conv_transpose2d(maps, into2d, bias, {2, 3}, {1, 0}, {1, 2}, 2, {1, 2}),
                  at::conv_transpose2d(maps, into2d, bias, {2, 3}, {1, 0}, {1, 2}, 2, {1, 2}));
  all &= is_close(ours::linear(maps, matrix, bias), at::linear(maps, matrix, bias));
  return holds("the other functions: the values are torch's", all);
}

}  // namespace

int main() {
  at::manual_seed(0);
  const at::Tensor images = at::randn({8, 64, 14, 14});
  const at::Tensor weight = at::randn({32, 64, 3, 3});
  const at::Tensor head = at::randn({10, 32});
  const at::Tensor image = images.slice(0, 0, 1);
  std::printf("instruction set: %s, numerics: %d\n", conv2d_ext::isa().c_str(),
              static_cast<int>(conv2d_ext::numerics()));

  const at::Tensor output = conv2d_ext::conv2d(images, weight, {}, /*stride=*/2, /*padding=*/{1, 1});
  const at::Tensor alone = conv2d_ext::conv2d(image, weight, {}, 2, 1);
  bool all = holds("conv2d: an image has the same bits in every batch", at::equal(output.slice(0, 0, 1), alone));
  all &= holds("conv2d: the values are at::conv2d's",
               at::allclose(output, at::conv2d(images, weight, {}, 2, 1), 1e-4, 1e-4));

  {
    const conv2d_ext::BatchInvariant mode;
    all &= holds("BatchInvariant: so do calls of torch",
                 at::equal(network(images, weight, head).slice(0, 0, 1), network(image, weight, head)));
  }

  at::Tensor leaf = weight.clone().set_requires_grad(true);
  conv2d_ext::conv2d(images, leaf).sum().backward();
  at::Tensor expected = weight.clone().set_requires_grad(true);
  at::conv2d(images, expected).sum().backward();
  all &= holds("backward: the gradient is at::conv2d's", at::allclose(leaf.grad(), expected.grad(), 1e-3, 1e-3));

  bool raised = false;
  try {
    conv2d_ext::conv2d(images, head);
  } catch (const c10::Error&) {
    raised = true;
  }
  all &= holds("a weight of the wrong rank raises", raised);
  all &= other_functions_hold();
  return all ? 0 : 1;
}
