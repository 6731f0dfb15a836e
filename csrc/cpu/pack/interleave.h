// Groups of 2, 4, 8 or 16 channels, channels innermost: [group][channel] <-> a vector of groups for each channel.
//
// Where vectors run over groups, a channels_last tensor holds a pixel's operands side by side, but in the wrong order.
// So `channels` whole vectors are loaded or stored, and reordered in registers.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

constexpr int64_t kMaxInterleaved = 16;
inline bool can_interleave(int64_t channels) {
  return channels == 2 || channels == 4 || channels == 8 || channels == kMaxInterleaved;
}

// r: [lane][channel] as it lies in memory -> r[channel][lane]. Elements of even number are the even channels; those
// are again channels of half the number.
template <class T, int C>
CONV2D_INLINE void deinterleave(typename Vec<T>::reg* r) {
  if constexpr (C > 1) {
    typename Vec<T>::reg even[C / 2], odd[C / 2];
#pragma GCC unroll 8
    for (int i = 0; i < C / 2; ++i) Vec<T>::unzip(r[2 * i], r[2 * i + 1], even[i], odd[i]);
    deinterleave<T, C / 2>(even);
    deinterleave<T, C / 2>(odd);
#pragma GCC unroll 8
    for (int i = 0; i < C / 2; ++i) {
      r[2 * i] = even[i];
      r[2 * i + 1] = odd[i];
    }
  }
}
// The inverse.
template <class T, int C>
CONV2D_INLINE void interleave(typename Vec<T>::reg* r) {
  if constexpr (C > 1) {
    typename Vec<T>::reg even[C / 2], odd[C / 2];
#pragma GCC unroll 8
    for (int i = 0; i < C / 2; ++i) {
      even[i] = r[2 * i];
      odd[i] = r[2 * i + 1];
    }
    interleave<T, C / 2>(even);
    interleave<T, C / 2>(odd);
#pragma GCC unroll 8
    for (int i = 0; i < C / 2; ++i) Vec<T>::zip(even[i], odd[i], r[2 * i], r[2 * i + 1]);
  }
}

// dst[x * dst_step + c * channel_pitch + lane] = src[x * step + lane * C + first + c] for x < count, c < channels and
// lane < lanes; zero in the other lanes.
template <class S, class T, int C>
void load_interleaved_of(const S* src, int64_t step, int64_t count, int64_t lanes, int64_t first, int64_t channels,
                         T* dst, int64_t dst_step, int64_t channel_pitch) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  const int64_t valid = lanes * C;
  for (int64_t x = 0; x < count; ++x, src += step, dst += dst_step) {
    typename V::reg r[C];
    if (lanes == L) {
#pragma GCC unroll 16
      for (int i = 0; i < C; ++i) r[i] = load_as(src + i * L);
    } else {
      for (int i = 0; i < C; ++i) {
        const int64_t n = min64(valid - i * L, L);
        r[i] = n <= 0 ? V::zero() : n == L ? load_as(src + i * L) : load_as_partial(src + i * L, int(n));
      }
    }
    deinterleave<T, C>(r);
    if (channels == C) {
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) V::store(dst + c * channel_pitch, r[c]);
    } else {
      for (int64_t c = 0; c < channels; ++c) V::store(dst + c * channel_pitch, r[first + c]);
    }
  }
}
template <class S, class T>
void load_interleaved(int64_t group_channels, const S* src, int64_t step, int64_t count, int64_t lanes, int64_t first,
                      int64_t channels, T* dst, int64_t dst_step, int64_t channel_pitch) {
  switch (group_channels) {
    case 2:
      return load_interleaved_of<S, T, 2>(src, step, count, lanes, first, channels, dst, dst_step, channel_pitch);
    case 4:
      return load_interleaved_of<S, T, 4>(src, step, count, lanes, first, channels, dst, dst_step, channel_pitch);
    case 8:
      return load_interleaved_of<S, T, 8>(src, step, count, lanes, first, channels, dst, dst_step, channel_pitch);
    default:
      return load_interleaved_of<S, T, 16>(src, step, count, lanes, first, channels, dst, dst_step, channel_pitch);
  }
}

// dst[x * step + lane * C + c] = src[c][x * src_step + lane] + bias[c * kLanes + lane] for x < count, lane < lanes.
// kFinished: these sums have had their last addition, and `bias` is not read.
template <bool kFinished, class S, class T, int C>
void store_interleaved_of(const T* const* src, int64_t src_step, int64_t count, int64_t lanes, const T* bias, S* dst,
                          int64_t step) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  const int64_t valid = lanes * C;
  for (int64_t x = 0; x < count; ++x, dst += step) {
    typename V::reg r[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) r[c] = V::load(src[c] + x * src_step);
    if constexpr (!kFinished) {
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) r[c] = V::add(r[c], V::load(bias + c * L));
    }
    interleave<T, C>(r);
    if (lanes == L) {
#pragma GCC unroll 16
      for (int i = 0; i < C; ++i) store_as(dst + i * L, r[i]);
    } else {
      for (int i = 0; i < C; ++i) {
        const int64_t n = min64(valid - i * L, L);
        if (n == L) {
          store_as(dst + i * L, r[i]);
        } else if (n > 0) {
          store_as_partial(dst + i * L, r[i], int(n));
        }
      }
    }
  }
}
template <bool kFinished, class S, class T>
void store_interleaved(int64_t channels, const T* const* src, int64_t src_step, int64_t count, int64_t lanes,
                       const T* bias, S* dst, int64_t step) {
  switch (channels) {
    case 2:
      return store_interleaved_of<kFinished, S, T, 2>(src, src_step, count, lanes, bias, dst, step);
    case 4:
      return store_interleaved_of<kFinished, S, T, 4>(src, src_step, count, lanes, bias, dst, step);
    case 8:
      return store_interleaved_of<kFinished, S, T, 8>(src, src_step, count, lanes, bias, dst, step);
    default:
      return store_interleaved_of<kFinished, S, T, 16>(src, src_step, count, lanes, bias, dst, step);
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
