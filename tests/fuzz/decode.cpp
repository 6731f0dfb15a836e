// From a fuzzer's bytes to a case. Uniform bytes make a sensible distribution, so that the seeded generator needs
// nothing else; bytes that are missing are zeros.
#include <algorithm>

#include "case.h"
#include "elements.h"
#include "seams.h"

namespace conv2d_ext::fuzz {

namespace {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  int64_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  // Below n <= 2^16.
  int64_t below(int64_t n) { return (n <= 256 ? byte() : byte() * 256 + byte()) % n; }
  int64_t from(int64_t low, int64_t high) { return low + below(high - low + 1); }
  // Never of missing bytes.
  bool one_in(int64_t n) { return below(n) == n - 1; }

 private:
  const uint8_t* data_;
  size_t left_;
};

int64_t small(Bytes& bytes) {
  static constexpr int64_t kMost[] = {1, 2, 3, 4, 4, 8, 18, 40};
  return bytes.from(1, kMost[bytes.below(8)]);
}

// Around the numbers of lanes, of panels and of segments.
int64_t channels(Bytes& bytes) {
  static constexpr int64_t kAround[] = {4, 8, 16, 24, 32, 48, 64, 96, 128, 256};
  switch (bytes.below(4)) {
    case 0:
      return bytes.from(1, 4);
    case 1:
      return bytes.from(1, 20);
    case 2:
      return std::max<int64_t>(1, kAround[bytes.below(6)] + bytes.from(-1, 1));
    default:
      return std::max<int64_t>(1, kAround[bytes.below(10)] + bytes.from(-1, 1));
  }
}

// Of any magnitude below 2^most.
int64_t any_size(Bytes& bytes, int64_t most) {
  const int64_t magnitude = bytes.below(most);
  return (int64_t{1} << magnitude) +
         (magnitude > 0 ? bytes.below(65536) % (int64_t{1} << std::min<int64_t>(magnitude, 16)) : 0);
}

// What an axis is drawn as: the output's size first, since that is what costs, the input's follows.
struct Axis {
  int64_t out = 1, kernel = 1, stride = 1, dilation = 1, before = 0, after = 0, slack = 0;

  void draw_padding(Bytes& bytes) {
    const int64_t reach = (kernel - 1) * dilation;
    switch (bytes.below(4)) {
      case 0:
        break;
      case 1:  // of an output as large as the input
        before = reach / 2;
        after = reach - before;
        break;
      case 2:
        before = bytes.from(0, std::min<int64_t>(reach, 255));
        after = bytes.from(0, std::min<int64_t>(reach, 255));
        break;
      default:
        before = bytes.from(0, std::min<int64_t>(2 * reach + 3, 255));
        after = bytes.from(0, 3);
    }
    slack = stride > 1 ? bytes.below(std::min<int64_t>(stride, 256)) : 0;
  }
  int64_t in() const {
    return std::max<int64_t>(1, (out - 1) * stride + (kernel - 1) * dilation + 1 - before - after + slack);
  }
};

enum class Kind {
  kAny,
  kDepthwise,
  kGrouped,
  kPointwise,
  kOnePixel,
  kPatches,
  kStrided,
  kDilated,
  kLargeKernel,
  kLongKernel,
  kPadded,
  kLongSum,
  kFewResults,
  kWideRows,
  kExtreme,
  kExpanded,
  kWinograd,
};

Layout draw_layout(Bytes& bytes, bool may_expand, bool dense) {
  Layout layout;
  const int64_t kind = bytes.below(8);
  layout.offset = bytes.one_in(3) ? bytes.below(32) : 0;
  if (kind < 2) return layout;
  layout.order = kind < 5 ? kChannelsLast : bytes.below(kOrders);
  // Gaps and repetitions of the two formats, which most kernels are for, more often than of the others.
  if (kind > 5 && bytes.one_in(2)) layout.order = bytes.one_in(2) ? kContiguous : kChannelsLast;
  layout.single = bytes.one_in(4) ? bytes.below(5) : 0;
  if (dense || kind < 6) return layout;
  if (kind == 6 || !may_expand) {
    for (int64_t& slice : layout.slice) slice = bytes.one_in(3) ? bytes.below(8) : 0;
  } else if (bytes.one_in(2)) {
    layout.windows = 1 + bytes.below(3);
  } else {
    layout.expanded = bytes.below(16);
  }
  layout.far = bytes.one_in(16);
  return layout;
}

// float32 most often, then the others that have kernels of their own.
int64_t draw_dtype(Bytes& bytes) {
  const std::vector<DType>& dtypes = dtypes_present();
  const int64_t wanted = bytes.below(64);
  if (wanted < 20) return int64_t(dtypes[0]);
  const int64_t most = wanted < 52 ? 6 : 11;
  int64_t there = 0;
  for (const DType dtype : dtypes) there += int64_t(dtype) < most;
  return int64_t(dtypes[size_t(bytes.below(there > 0 ? there : int64_t(dtypes.size())))]);
}

int64_t draw_values(Bytes& bytes) {
  static constexpr Values kDrawn[] = {
      Values::kNormal,      Values::kNormal,   Values::kNormal,    Values::kNormal,
      Values::kPositive,    Values::kPositive, Values::kRectified, Values::kSmallWhole,
      Values::kSmallWhole,  Values::kZeros,    Values::kDenormal,  Values::kUnderflowing,
      Values::kOverflowing, Values::kWild,     Values::kInfinite,  Values::kNaN};
  return int64_t(kDrawn[bytes.below(16)]);
}

// Sizes whose products are about `most`: halves what is largest, but what makes the kind.
void fit(Kind kind, Case& c, Axis& h, Axis& w, double most) {
  const auto cost = [&] {
    return double(c.batch) * double(c.groups) * double(c.in) * double(c.out) * double(h.out) * double(w.out) *
           double(h.kernel) * double(w.kernel);
  };
  while (cost() > most) {
    int64_t* sizes[] = {&c.batch, &h.out, &w.out, &c.out, &c.in, &c.groups, &h.kernel, &w.kernel};
    bool keep[8] = {};
    keep[5] = kind == Kind::kDepthwise || kind == Kind::kGrouped;
    keep[4] = kind == Kind::kLongSum && is_forward(Op(c.op));
    keep[3] = (kind == Kind::kLongSum && c.op == int64_t(Op::kGradInput)) || kind == Kind::kDepthwise;
    keep[6] = keep[7] = kind == Kind::kLargeKernel || kind == Kind::kLongKernel;
    keep[2] = kind == Kind::kWideRows;
    for (int i = 1; kind == Kind::kWinograd && i < 8; ++i) keep[i] = i != 5;
    int largest = -1;
    for (int i = 0; i < 8; ++i) {
      if (!keep[i] && *sizes[i] > 1 && (largest < 0 || *sizes[i] > *sizes[largest])) largest = i;
    }
    if (largest < 0) {  // what is kept has to give, too
      for (int i = 0; i < 8; ++i) {
        if (largest < 0 || *sizes[i] > *sizes[largest]) largest = i;
      }
    }
    *sizes[largest] = std::max<int64_t>(1, *sizes[largest] / 2);
  }
}

// Few rows, which have drivers of their own, as often as more.
void draw_product(Bytes& bytes, Kind kind, Case& c, Axis& h, Axis& w) {
  h = w = Axis();
  c.groups = 1;
  c.batch = bytes.one_in(2) ? 1 : bytes.from(1, 9);
  w.out = bytes.one_in(2) ? bytes.from(1, 9) : small(bytes);
  if (kind == Kind::kLongSum) c.in = bytes.one_in(3) ? bytes.from(2000, 10000) : bytes.from(100, 1000);
}

void draw_extreme(Bytes& bytes, int64_t& in, int64_t& kernel, int64_t& stride, int64_t& dilation, int64_t& before,
                  int64_t& after) {
  in = bytes.from(1, 5);
  kernel = bytes.from(1, 3);
  dilation = any_size(bytes, 62);
  stride = any_size(bytes, 62);
  before = bytes.one_in(3) ? 0 : any_size(bytes, 62);
  // The padded size is what the kernel takes, and some strides more.
  int64_t reach = 0, padded = 0, more = 0;
  if (__builtin_mul_overflow(dilation, kernel - 1, &reach) || __builtin_add_overflow(reach, 1, &reach)) return;
  if (__builtin_mul_overflow(stride, bytes.from(0, 3), &more) || __builtin_add_overflow(reach, more, &padded)) return;
  if (__builtin_add_overflow(padded, bytes.below(4), &padded)) return;
  if (bytes.one_in(4)) padded = INT64_MAX - bytes.below(3);
  if (padded - in < 0) return;
  before = std::min(before, padded - in);
  after = padded - in - before;
}

void draw_plan(Bytes& bytes, Case& c) {
  Axis axes[2];
  const int64_t most[] = {5, 9, 12, 17};
  for (Axis& axis : axes) {
    axis.out = any_size(bytes, bytes.one_in(3) ? 13 : 8);
    axis.kernel = bytes.one_in(3) ? bytes.from(1, 256) : bytes.from(1, 7);
    axis.stride = bytes.one_in(2) ? bytes.from(1, 4) : any_size(bytes, most[bytes.below(4)]);
    axis.dilation = bytes.one_in(2) ? any_size(bytes, most[bytes.below(4)]) : 1;
    axis.draw_padding(bytes);
  }
  if (axes[0].kernel * axes[1].kernel > 4096) axes[bytes.below(2)].kernel = 1;
  c.batch = any_size(bytes, bytes.one_in(8) ? 40 : 8);
  c.groups = bytes.one_in(2) ? 1 : any_size(bytes, 12);
  c.in = bytes.one_in(2) ? 1 : any_size(bytes, 12);
  c.out = bytes.one_in(2) ? c.in : any_size(bytes, 12);
  c.in_h = axes[0].in();
  c.in_w = axes[1].in();
  c.kernel_h = axes[0].kernel;
  c.kernel_w = axes[1].kernel;
  c.stride_h = axes[0].stride;
  c.stride_w = axes[1].stride;
  c.dilation_h = axes[0].dilation;
  c.dilation_w = axes[1].dilation;
  c.top = axes[0].before;
  c.bottom = axes[0].after;
  c.left = axes[1].before;
  c.right = axes[1].after;
}

}  // namespace

Case decode(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  Case c;
  c.op = bytes.below(16);
  c.op = c.op == 15 ? int64_t(Op::kGradBias) : c.op >= 13 ? int64_t(Op::kMatmul) : c.op % 3;
  c.dtype = draw_dtype(bytes);
  const std::vector<int>& isas = isas_present();
  c.isa = isas[size_t(bytes.below(int64_t(isas.size())))];
  c.threads = bytes.from(1, 4);
  c.schedule = bytes.below(4);
  c.rounding = bytes.one_in(8) ? bytes.below(4) : 0;
  c.flush = bytes.one_in(8) ? bytes.below(3) : 0;
  c.limits = bytes.one_in(4) ? 0 : bytes.from(1, 255);
  c.variants = bytes.byte() + 256 * bytes.byte();
  for (int t = 0; t < 3; ++t) c.values[t] = draw_values(bytes);
  if (bytes.below(2) == 0) c.values[1] = c.values[0];
  c.seed = bytes.byte() + 256 * bytes.byte();
  c.bias = bytes.below(2);
  c.bias_stride = bytes.one_in(2) ? bytes.below(4) : 1;

  if (c.op != int64_t(Op::kMatmul) && bytes.one_in(12)) {
    c.plan = 1;
    draw_plan(bytes, c);
    return c;
  }

  const Kind kind = Kind(bytes.below(17));
  Axis h, w;
  c.batch = bytes.from(1, bytes.one_in(3) ? 9 : 3);
  if (bytes.one_in(24)) c.batch = bytes.from(1, 80);
  c.groups = bytes.one_in(4) ? small(bytes) : 1;
  c.in = channels(bytes);
  c.out = channels(bytes);
  h.out = small(bytes);
  w.out = small(bytes);
  h.kernel = bytes.from(1, bytes.one_in(4) ? 9 : 3);
  w.kernel = bytes.from(1, bytes.one_in(4) ? 9 : 3);
  for (Axis* axis : {&h, &w}) {
    axis->stride = bytes.one_in(3) ? bytes.from(1, 5) : 1;
    axis->dilation = bytes.one_in(4) ? bytes.from(1, 5) : 1;
  }
  double most = bytes.one_in(32) ? 200e3 : 20e3;
  switch (kind) {
    case Kind::kDepthwise:
      c.groups = channels(bytes);
      c.in = 1;
      c.out = bytes.one_in(4) ? bytes.from(1, 4) : 1;
      if (bytes.one_in(2)) h.kernel = w.kernel = bytes.from(1, 7);
      if (bytes.one_in(2)) h.stride = w.stride = bytes.from(1, 2);
      break;
    case Kind::kGrouped:
      c.groups = channels(bytes);
      c.in = bytes.one_in(2) ? int64_t{1} << bytes.below(5) : bytes.from(1, 17);
      c.out = bytes.one_in(2) ? int64_t{1} << bytes.below(5) : bytes.from(1, 17);
      break;
    case Kind::kPointwise:
      h.kernel = w.kernel = 1;
      break;
    case Kind::kOnePixel:
      h.out = w.out = 1;
      break;
    case Kind::kPatches:
      h.stride = h.kernel + bytes.below(2);
      w.stride = w.kernel = bytes.from(1, 9);
      break;
    case Kind::kStrided:
      h.stride = bytes.from(1, 4);
      w.stride = bytes.from(1, 4);
      h.kernel = bytes.from(1, 7);
      w.kernel = bytes.from(1, 7);
      break;
    case Kind::kDilated:
      h.dilation = bytes.from(1, 24);
      w.dilation = bytes.from(1, 24);
      break;
    case Kind::kLargeKernel:
      h.kernel = bytes.from(7, 17);
      w.kernel = bytes.from(7, 17);
      if (bytes.one_in(3)) {  // depthwise ones, whose phases have several chains of taps
        c.groups = bytes.from(1, 20);
        c.in = c.out = 1;
        h.stride = bytes.from(1, 2);
        w.stride = 2;
      }
      break;
    case Kind::kLongKernel:
      h.kernel = bytes.from(1, 2);
      w.kernel = bytes.from(1, 256);
      if (bytes.one_in(2)) std::swap(h.kernel, w.kernel);
      break;
    case Kind::kLongSum:
      c.in = bytes.one_in(2) ? bytes.from(300, 3000) : bytes.from(30, 300);
      c.out = bytes.one_in(2) ? bytes.from(300, 3000) : bytes.from(30, 300);
      if (is_forward(Op(c.op))) c.out = bytes.from(1, 9);
      // As many channels as joined phases want, or few.
      if (c.op == int64_t(Op::kGradInput)) c.in = bytes.one_in(3) ? bytes.from(16, 33) : bytes.from(1, 9);
      if (c.op == int64_t(Op::kGradWeight)) {
        c.in = bytes.from(1, 9);
        c.out = bytes.from(1, 9);
        h.out = bytes.from(1, 100);
        w.out = bytes.from(1, 100);
      }
      if (c.op != int64_t(Op::kGradWeight) && bytes.one_in(2)) h.kernel = w.kernel = bytes.from(1, 7);
      most = bytes.one_in(8) ? 1e6 : 50e3;
      break;
    case Kind::kFewResults:
      c.in = bytes.from(1, 8);
      c.out = bytes.from(1, 8);
      h.out = bytes.from(1, 40);
      w.out = bytes.from(1, 60);
      break;
    case Kind::kWideRows:
      h.out = bytes.from(1, 3);
      w.out = bytes.from(1, 2000);
      c.in = bytes.from(1, 20);
      c.out = bytes.from(1, 20);
      break;
    case Kind::kWinograd:
      c.winograd = 1;
      c.groups = bytes.from(1, 2);
      c.in = bytes.from(15, 24);
      c.out = bytes.from(15, 24);
      if (bytes.one_in(4)) (bytes.one_in(2) ? c.in : c.out) += bytes.from(1, 50);
      h = w = Axis();
      h.kernel = w.kernel = 3;
      h.out = bytes.from(6, 10);
      w.out = bytes.from(6, 20);
      most = 1e6;
      break;
    default:
      break;
  }
  if (c.op == int64_t(Op::kMatmul)) draw_product(bytes, kind, c, h, w);
  fit(kind, c, h, w, most);
  // Weights are packed for every tile: small ones would take long.
  if (most > 20e3 && kind != Kind::kWinograd) c.limits = c.limits == 0 ? 0 : kProductLimits + c.limits % kMachines;
  if (c.op != int64_t(Op::kMatmul)) {
    h.draw_padding(bytes);
    w.draw_padding(bytes);
  }
  if (kind == Kind::kPadded && c.op != int64_t(Op::kMatmul)) {
    h.before += bytes.below(40);
    w.after += bytes.below(40);
    w.before += bytes.below(10);
  }
  c.in_h = h.in();
  c.in_w = w.in();
  const double elements = double(c.batch) * double(c.groups) * double(c.in);
  if (elements * double(c.in_h) * double(c.in_w) > 50e3) {
    h.stride = w.stride = h.dilation = w.dilation = 1;
    h.before = h.after = w.before = w.after = h.slack = w.slack = 0;
    c.in_h = h.in();
    c.in_w = w.in();
  }
  c.kernel_h = h.kernel;
  c.kernel_w = w.kernel;
  c.stride_h = h.stride;
  c.stride_w = w.stride;
  c.dilation_h = h.dilation;
  c.dilation_w = w.dilation;
  c.top = h.before;
  c.bottom = h.after;
  c.left = w.before;
  c.right = w.after;
  // Strides and dilations that mean nothing may be anything.
  if (bytes.one_in(16) && h.out == 1 && h.slack == 0) c.stride_h = any_size(bytes, 63);
  if (bytes.one_in(16) && w.out == 1 && w.slack == 0) c.stride_w = any_size(bytes, 63);
  if (bytes.one_in(16) && h.kernel == 1) c.dilation_h = any_size(bytes, 63);
  if (bytes.one_in(16) && w.kernel == 1) c.dilation_w = any_size(bytes, 63);
  if (c.op == int64_t(Op::kMatmul)) {
    c.stride_w = c.stride_h = c.dilation_w = c.dilation_h = 1;
  } else if (kind == Kind::kExtreme) {
    c.batch = bytes.from(1, 3);
    c.groups = bytes.from(1, 2);
    c.in = std::min<int64_t>(c.in, 20);
    c.out = std::min<int64_t>(c.out, 20);
    draw_extreme(bytes, c.in_w, c.kernel_w, c.stride_w, c.dilation_w, c.left, c.right);
    if (bytes.one_in(2)) draw_extreme(bytes, c.in_h, c.kernel_h, c.stride_h, c.dilation_h, c.top, c.bottom);
    if (bytes.one_in(4)) {
      c.groups *= std::max<int64_t>(c.in, c.out);
      c.in = c.out = 1;
    }
  }
  const bool result_is_weight = c.op == int64_t(Op::kGradWeight);
  // Layouts of results: what the library allocates, and sometimes any other.
  const bool any_result = bytes.one_in(4);
  const int result = result_is_weight ? 1 : c.op == int64_t(Op::kGradInput) ? 0 : 2;
  for (int t = 0; t < 3; ++t) {
    c.layout[t] = draw_layout(bytes, t != result, t == result && !any_result);
    if (t == result && !any_result && !result_is_weight && c.layout[t].order != kContiguous) {
      c.layout[t].order = kChannelsLast;
    }
  }
  if (kind == Kind::kExpanded && c.op != int64_t(Op::kMatmul)) {
    // Sizes beyond 2^31 of an input that is expanded.
    if (result != 0) {
      c.layout[0] = Layout();
      c.layout[0].expanded = bytes.below(2) == 0 ? 4 : 8;
      int64_t& size = c.layout[0].expanded == 4 ? c.in_h : c.in_w;
      int64_t& stride = c.layout[0].expanded == 4 ? c.stride_h : c.stride_w;
      int64_t& kernel = c.layout[0].expanded == 4 ? c.kernel_h : c.kernel_w;
      int64_t& dilation = c.layout[0].expanded == 4 ? c.dilation_h : c.dilation_w;
      size = any_size(bytes, 36);
      stride = std::max<int64_t>(1, size / bytes.from(1, 5));
      dilation = kernel > 1 && bytes.one_in(2) ? std::max<int64_t>(1, size / (kernel * 2)) : 1;
    }
  }
  if (bytes.one_in(64)) {
    (bytes.one_in(2) ? c.batch : c.in) = 0;
    if (bytes.one_in(4)) c.in_h = 0;
  }
  return c;
}

// ---- elements -------------------------------------------------------------------------------------------------------

namespace {

// Around the numbers of lanes, of a block and of a part, and of rows that are kept.
int64_t row_length(Bytes& bytes) {
  static constexpr int64_t kAround[] = {8, 16, 32, 64, 128, 512, 1024, 2032, 2048, 4096};
  switch (bytes.below(4)) {
    case 0:
      return bytes.from(1, 5);
    case 1:
      return bytes.from(1, 70);
    case 2:
      return std::max<int64_t>(1, kAround[bytes.below(4)] + bytes.from(-1, 1));
    default:
      return std::max<int64_t>(1, kAround[bytes.below(10)] + bytes.from(-2, 2));
  }
}

void draw_sum(Bytes& bytes, ElementCase& c) {
  c.layout = draw_layout(bytes, true, false);
  c.layout.far = 0;
  c.reduced = bytes.from(0, 15);
  for (int64_t& size : c.size) size = bytes.one_in(4) ? 1 : small(bytes);
  const int64_t longest = bytes.below(4);
  c.size[longest] = row_length(bytes);
  if (bytes.one_in(12)) {  // more than one part
    for (int64_t& size : c.size) size = bytes.from(1, 2);
    c.size[longest] = 32768 + (bytes.one_in(2) ? bytes.from(-1, 1) : bytes.below(20000));
    c.reduced |= int64_t{1} << longest;
  }
}

}  // namespace

ElementCase decode_elements(const uint8_t* data, size_t size) {
  static constexpr ElementOp kDrawn[] = {ElementOp::kValue,         ElementOp::kValue,      ElementOp::kSlope,
                                         ElementOp::kSlope,         ElementOp::kPair,       ElementOp::kSum,
                                         ElementOp::kSum,           ElementOp::kSum,        ElementOp::kSum,
                                         ElementOp::kSum,           ElementOp::kSoftmax,    ElementOp::kSoftmax,
                                         ElementOp::kSoftmaxGrad,   ElementOp::kLogSoftmax, ElementOp::kLogSoftmaxGrad,
                                         ElementOp::kLogSoftmaxGrad};
  Bytes bytes(data, size);
  ElementCase c;
  c.op = int64_t(kDrawn[bytes.below(16)]);
  c.dtype = bytes.below(4);
  const std::vector<int> isas = element_isas();
  c.isa = isas[size_t(bytes.below(int64_t(isas.size())))];
  c.function = bytes.below(128);
  c.threads = bytes.from(1, 4);
  c.schedule = bytes.below(4);
  c.seed = bytes.byte() + 256 * bytes.byte();
  for (int64_t& values : c.values) values = draw_values(bytes);
  for (int64_t& offset : c.offset) offset = bytes.one_in(3) ? bytes.below(32) : 0;
  c.flush = bytes.one_in(8) ? bytes.from(1, 2) : 0;
  if (c.flush != 0 && bytes.one_in(2)) c.values[0] = int64_t(Values::kLeastNormal);
  if (c.op < int64_t(ElementOp::kSum)) {
    c.size[0] = row_length(bytes);
  } else if (c.op == int64_t(ElementOp::kSum)) {
    draw_sum(bytes, c);
  } else {
    c.size[0] = small(bytes);
    c.size[1] = row_length(bytes);
    c.size[2] = bytes.one_in(2) ? small(bytes) : 1;
    while (c.size[0] * c.size[1] * c.size[2] > 20000) c.size[c.size[0] > 1 ? 0 : c.size[2] > 1 ? 2 : 1] /= 2;
  }
  return c;
}

}  // namespace conv2d_ext::fuzz
