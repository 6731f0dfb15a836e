// The CUDA engine's interface as one C function, for ctypes: a call with its tensors in memory of the host, answered in
// JSON.
//
// Each tensor is copied into a block of exactly its extent, so that AddressSanitizer sees what lies beyond it; without
// it, guards lie there. NaNs fill what lies between a tensor's elements, and results and workspace until they are
// written, and guards of what is read.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "../../csrc/cuda/conv2d_cuda.h"
#include "../../csrc/cuda/plan.h"
#include "execution.h"
#include "sanitizer.h"

using conv2d_ext::ConstMatrixView;
using conv2d_ext::ConstTensorView;
using conv2d_ext::Conv2dProblem;
using conv2d_ext::DType;
using conv2d_ext::MatmulSizes;
using conv2d_ext::MatrixView;
using conv2d_ext::TensorView;
using conv2d_ext::cuda::Direction;
using conv2d_ext::cuda::Float32Math;
using conv2d_ext::cuda::Machine;
using conv2d_ext::cuda::Plan;
using conv2d_ext::cuda_host::AccessKind;
using conv2d_ext::cuda_host::Failure;
using conv2d_ext::cuda_host::Order;
using conv2d_ext::cuda_host::Session;
using conv2d_ext::cuda_host::Settings;

extern "C" {

struct HostTensor {
  void* data;  // of element (0, 0, 0, 0)
  int64_t size[4], stride[4];
};

// `direction`: a Direction, 3 for grad_bias, or 4 for matmul, whose operands have the sizes (B, M, K, 1), (B or 1, K,
// N, 1) and (B, M, N, 1) and whose problem is not read. The operands of the others are (input, weight), (grad_output,
// weight), (grad_output, input) or grad_output alone. bias: size[0] elements; data null where there is none.
struct HostCall {
  int64_t direction, dtype, math, plan_only, order, seed, holds, counts_banks, sm_count, shared_bytes, variant, split,
      packed;
  Conv2dProblem problem;
  HostTensor first, second, bias, result;
};
}

namespace {

constexpr int kGradBias = 3, kMatmul = 4;
constexpr unsigned char kFill = 0xff, kResultGuard = 0x7f;

// Memory of NaNs, `before` bytes past an alignment of 256. Where AddressSanitizer doesn't watch, a guard lies on either
// side: what is read there is NaN whatever the heap held, and what is written there fails the call. (A result, which is
// not read, has guards of other bytes, since what is computed from NaNs is the same NaN.)
class Memory {
 public:
  Memory(size_t before, size_t bytes, unsigned char guard = kFill)
      : before_(kGuard + before), bytes_(bytes), guard_(guard) {
    void* block = nullptr;
    if (posix_memalign(&block, kAlignment, before_ + bytes + kGuard) != 0) throw std::bad_alloc();
    block_.reset(static_cast<unsigned char*>(block));
    std::memset(block, guard, before_ + bytes + kGuard);
    std::memset(data(), kFill, bytes);
#if defined(CONV2D_ADDRESS_SANITIZER)
    __asan_poison_memory_region(block, before_);
#endif
  }
  ~Memory() {
#if defined(CONV2D_ADDRESS_SANITIZER)
    __asan_unpoison_memory_region(block_.get(), before_);
#endif
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return reinterpret_cast<char*>(block_.get() + before_); }
  void check_guards() const {
    if (kGuard == 0) return;
    const auto is_changed = [this](unsigned char byte) { return byte != guard_; };
    const unsigned char* const past = block_.get() + before_ + bytes_;
    if (std::any_of(block_.get(), block_.get() + before_, is_changed) || std::any_of(past, past + kGuard, is_changed))
      throw Failure("written outside of a tensor or the workspace");
  }

  static constexpr size_t kAlignment = 256;

 private:
#if defined(CONV2D_ADDRESS_SANITIZER)
  static constexpr size_t kGuard = 0;
#else
  static constexpr size_t kGuard = 65536;
#endif
  struct Free {
    void operator()(unsigned char* block) const { std::free(block); }
  };

  const size_t before_, bytes_;
  const unsigned char guard_;
  std::unique_ptr<unsigned char, Free> block_;
};

// A tensor's elements at the same distances, and the same place modulo 256, in a block of their own.
class Block {
 public:
  Block(const HostTensor& tensor, int64_t element_bytes, unsigned char guard = kFill)
      : tensor_(tensor), element_bytes_(element_bytes) {
    int64_t lowest = 0, highest = 0;
    for (int i = 0; i < 4; ++i) {
      const int64_t reach = (tensor.size[i] - 1) * tensor.stride[i];
      (reach < 0 ? lowest : highest) += reach;
    }
    const bool is_empty = std::any_of(tensor.size, tensor.size + 4, [](int64_t size) { return size == 0; });
    extent_ = is_empty ? 0 : (highest - lowest + 1) * element_bytes;
    const uintptr_t first_byte = reinterpret_cast<uintptr_t>(tensor.data) + (is_empty ? 0 : lowest * element_bytes);
    const size_t before = first_byte % Memory::kAlignment;
    memory_ = std::make_unique<Memory>(before, extent_, guard);
    data_ = memory_->data() - (is_empty ? 0 : lowest * element_bytes);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void copy_in() const {
    each([&](char* here, char* there) { std::memcpy(here, there, element_bytes_); });
  }
  void copy_out() const {
    each([&](char* here, char* there) { std::memcpy(there, here, element_bytes_); });
  }
  ConstTensorView view() const { return {data_, {stride(0), stride(1), stride(2), stride(3)}}; }
  void check_guards() const { memory_->check_guards(); }
  TensorView mutable_view() const { return {data_, {stride(0), stride(1), stride(2), stride(3)}}; }

 private:
  int64_t stride(int i) const { return tensor_.stride[i]; }

  template <class Copy>
  void each(const Copy& copy) const {
    const HostTensor& t = tensor_;
    for (int64_t n = 0; n < t.size[0]; ++n)
      for (int64_t c = 0; c < t.size[1]; ++c)
        for (int64_t h = 0; h < t.size[2]; ++h)
          for (int64_t w = 0; w < t.size[3]; ++w) {
            const int64_t offset =
                (n * t.stride[0] + c * t.stride[1] + h * t.stride[2] + w * t.stride[3]) * element_bytes_;
            copy(data_ + offset, static_cast<char*>(t.data) + offset);
          }
  }

  const HostTensor tensor_;
  const int64_t element_bytes_;
  int64_t extent_ = 0;
  std::unique_ptr<Memory> memory_;
  char* data_ = nullptr;
};

ConstMatrixView matrix(const Block& block) {
  const ConstTensorView view = block.view();
  return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
MatrixView mutable_matrix(const Block& block) {
  const TensorView view = block.mutable_view();
  return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
MatmulSizes matmul_sizes(const HostCall& call) {
  return {call.first.size[0], call.first.size[1], call.second.size[2], call.first.size[2]};
}

Plan plan_of(const HostCall& call, const Block& first, const Block& second, const Block& result) {
  const auto dtype = static_cast<DType>(call.dtype);
  const auto math = static_cast<Float32Math>(call.math);
  const Machine machine{static_cast<int>(call.sm_count), static_cast<int>(call.shared_bytes),
                        static_cast<int>(call.variant), static_cast<int>(call.split), static_cast<int>(call.packed)};
  const TensorView view = result.mutable_view();
  if (call.direction == kMatmul) {
    return plan_matmul(matmul_sizes(call), dtype, math, matrix(first), matrix(second), mutable_matrix(result), machine);
  }
  switch (static_cast<Direction>(call.direction)) {
    case Direction::kForward:
      return plan_forward(call.problem, dtype, math, first.view(), second.view(), view.stride, machine);
    case Direction::kGradInput:
      return plan_grad_input(call.problem, dtype, math, first.view(), second.view(), view.stride, machine);
    default:
      return plan_grad_weight(call.problem, dtype, math, first.view(), second.view(), machine);
  }
}

class Json {
 public:
  void add(const std::string& name, int64_t value) { member(name) += std::to_string(value); }
  void add(const std::string& name, const std::string& value) {
    std::string& text = member(name) += '"';
    for (const char c : value) {
      if (c == '"' || c == '\\') text += '\\';
      text += c;
    }
    text += '"';
  }
  // value: JSON itself.
  void add_raw(const std::string& name, const std::string& value) { member(name) += value; }
  std::string text() const { return "{" + members_ + "}"; }

 private:
  std::string& member(const std::string& name) {
    return members_ += (members_.empty() ? "\"" : ", \"") + name + "\": ";
  }
  std::string members_;
};

std::string describe(const Plan& plan) {
  Json json;
  json.add("engine", static_cast<int64_t>(plan.engine));
  json.add("kernel", plan.kernel);
  json.add("variant", plan.variant);
  json.add("vector_a", static_cast<int64_t>(plan.vector_a));
  json.add("vector_b", static_cast<int64_t>(plan.vector_b));
  json.add("stages", plan.stages);
  json.add("tile_m", plan.tile_m);
  json.add("tile_n", plan.tile_n);
  json.add("tile_k", plan.tile_k);
  json.add("threads", plan.threads);
  json.add("gemm_m", plan.gemm_m);
  json.add("gemm_n", plan.gemm_n);
  json.add("gemm_k", plan.gemm_k);
  json.add("segments", plan.segments);
  json.add("segment_length", plan.segment_length);
  json.add("chain_length", plan.chain_length);
  json.add("split", plan.split);
  json.add("packed_row", plan.packed_row);
  json.add("ctas", plan.ctas);
  json.add("shared_bytes", plan.shared_bytes);
  json.add("workspace_bytes", plan.workspace_bytes);
  json.add("refused", plan.refused);
  json.add("wanted", plan.wanted);
  json.add("error", plan.error);
  return json.text();
}

const char* name_of(AccessKind kind) {
  switch (kind) {
    case AccessKind::kLoad:
      return "load";
    case AccessKind::kStore:
      return "store";
    case AccessKind::kCopy:
      return "copy";
    case AccessKind::kMatrix:
      break;
  }
  return "matrix";
}

std::string describe(const Session& session) {
  std::string text = "[";
  for (const auto& at : session.traffic) {
    Json json;
    json.add("kernel", at.kernel);
    json.add("file", at.access.site.file_name());
    json.add("line", at.access.site.line);
    json.add("kind", name_of(at.access.kind));
    json.add("bytes", at.access.bytes);
    json.add("accesses", static_cast<int64_t>(at.access.traffic.accesses));
    json.add("wavefronts", static_cast<int64_t>(at.access.traffic.wavefronts));
    json.add("ideal", static_cast<int64_t>(at.access.traffic.ideal));
    text += (text.size() == 1 ? "" : ", ") + json.text();
  }
  return text + "]";
}

void run(const HostCall& call, Json& json) {
  const auto dtype = static_cast<DType>(call.dtype);
  const int64_t bytes = size_of(dtype);
  const Block first(call.first, bytes), second(call.second, bytes), bias(call.bias, bytes);
  const Block result(call.result, bytes, kResultGuard);

  const bool is_grad_bias = call.direction == kGradBias;
  const Conv2dProblem& p = call.problem;
  int64_t workspace_bytes;
  Plan plan{};
  if (is_grad_bias) {
    const char* const error = conv2d_ext::cuda::grad_bias_error(p.batch, p.out_channels, p.out_h, p.out_w, dtype);
    if (error[0] != '\0') json.add("error", error);
    if (error[0] != '\0' || call.plan_only != 0) return;
    workspace_bytes = conv2d_ext::cuda::grad_bias_workspace(p.batch, p.out_channels, p.out_h, p.out_w, dtype);
  } else {
    plan = plan_of(call, first, second, result);
    json.add_raw("plan", describe(plan));
    if (plan.error[0] != '\0') {
      json.add("error", plan.error);
      return;
    }
    workspace_bytes = plan.workspace_bytes;
    if (call.plan_only != 0) return;
  }
  json.add("workspace_bytes", workspace_bytes);
  first.copy_in();
  second.copy_in();
  if (call.bias.data != nullptr) bias.copy_in();
  const Memory workspace_memory(0, workspace_bytes);
  void* const workspace = workspace_bytes == 0 ? nullptr : workspace_memory.data();

  Settings settings;
  settings.order = static_cast<Order>(call.order);
  settings.seed = static_cast<uint64_t>(call.seed);
  settings.holds = call.holds != 0;
  settings.counts_banks = call.counts_banks != 0;
  settings.shared_bytes_per_block = static_cast<int>(call.shared_bytes);
  Session session(settings);
  const void* const bias_data = call.bias.data == nullptr ? nullptr : bias.view().data;
  cudaError_t error = cudaSuccess;
  if (is_grad_bias) {
    error = conv2d_ext::cuda::grad_bias(p.batch, p.out_channels, p.out_h, p.out_w, dtype, first.view(),
                                        result.mutable_view().data, workspace, nullptr);
  } else if (call.direction == kMatmul) {
    error = matmul(plan, matmul_sizes(call), matrix(first), matrix(second), bias_data, call.bias.stride[0],
                   mutable_matrix(result), workspace, nullptr);
  } else if (plan.direction == Direction::kForward) {
    error = forward(plan, p, first.view(), second.view(), bias_data, call.bias.stride[0], result.mutable_view(),
                    workspace, nullptr);
  } else if (plan.direction == Direction::kGradInput) {
    error = grad_input(plan, p, first.view(), second.view(), result.mutable_view(), workspace, nullptr);
  } else {
    error = grad_weight(plan, p, first.view(), second.view(), result.mutable_view(), workspace, nullptr);
  }
  json.add_raw("traffic", describe(session));
  json.add("launches", static_cast<int64_t>(session.launches));
  if (error != cudaSuccess) json.add("error", cudaGetErrorString(error));
  workspace_memory.check_guards();
  result.check_guards();
  result.copy_out();
}

}  // namespace

// A JSON object, valid until the thread's next call: "error" where the call failed, and as far as it came "plan",
// "traffic", "launches" and "workspace_bytes".
extern "C" const char* cuda_host_run(const HostCall* call) {
  thread_local std::string answer;
  Json json;
  try {
    run(*call, json);
  } catch (const Failure& failure) {
    json.add("error", failure.what());
  }
  answer = json.text();
  return answer.c_str();
}

// Calls whose launch waits for another thread's, as `holds` asks.
extern "C" int64_t cuda_host_held() { return conv2d_ext::cuda_host::held_sessions(); }

// The names of all kernels that plans choose from, for a dtype and a Float32Math, separated by newlines.
extern "C" const char* cuda_host_kernels(int64_t dtype, int64_t math) {
  static std::string names;
  names.clear();
  const auto table = conv2d_ext::cuda::gemm_table(static_cast<DType>(dtype), static_cast<Float32Math>(math));
  for (int i = 0; i < table.count; ++i) names += std::string(i == 0 ? "" : "\n") + table.kernels[i].name;
  return names.c_str();
}
