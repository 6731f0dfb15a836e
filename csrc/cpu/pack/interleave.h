// Groups of 2, 4, 8 or 16 channels, channels innermost: [group][channel] <-> a vector of groups for each channel.
//
// Where vectors run over groups, a channels_last tensor holds a pixel's operands side by side, but in the wrong order.
// So `channels` whole vectors are loaded or stored, and reordered in registers.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// V: the vectors, with their zip and unzip. r: [lane][channel] as it lies in memory -> r[channel][lane]. Elements of
// even number are the even channels; those are again channels of half the number.
template <class V, int C>
CONV2D_INLINE void deinterleave(typename V::reg* r) {
  if constexpr (C > 1) {
    typename V::reg even[C / 2], odd[C / 2];
#pragma GCC unroll 8
    for (int i = 0; i < C / 2; ++i) V::unzip(r[2 * i], r[2 * i + 1], even[i], odd[i]);
    deinterleave<V, C / 2>(even);
    deinterleave<V, C / 2>(odd);
#pragma GCC unroll 8
    for (int i = 0; i < C / 2; ++i) {
      r[2 * i] = even[i];
      r[2 * i + 1] = odd[i];
    }
  }
}
// The inverse.
template <class V, int C>
CONV2D_INLINE void interleave(typename V::reg* r) {
  if constexpr (C > 1) {
    typename V::reg even[C / 2], odd[C / 2];
#pragma GCC unroll 8
    for (int i = 0; i < C / 2; ++i) {
      even[i] = r[2 * i];
      odd[i] = r[2 * i + 1];
    }
    interleave<V, C / 2>(even);
    interleave<V, C / 2>(odd);
#pragma GCC unroll 8
    for (int i = 0; i < C / 2; ++i) V::zip(even[i], odd[i], r[2 * i], r[2 * i + 1]);
  }
}

// Pixels of whole groups, whose channels lie side by side: `count` pixels that are `step` apart, of `lanes` groups.
template <class S>
struct GroupPixels {
  S* data;
  int64_t step, count, lanes;
};
// The same as a vector of groups for each channel: channel c of pixel x at data[c * channel_pitch + x * step].
template <class T>
struct GroupPlanes {
  T* data;
  int64_t step, channel_pitch;
};

// Channels [first, first + channels) of C; zero in the lanes that have no group.
template <int C, class S, class T>
void load_interleaved_of(const GroupPixels<const S>& from, int64_t first, int64_t channels, const GroupPlanes<T>& to) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  const S* src = from.data;
  T* dst = to.data;
  for (int64_t x = 0; x < from.count; ++x, src += from.step, dst += to.step) {
    typename V::reg r[C];
    if (from.lanes == L) {
#pragma GCC unroll 16
      for (int i = 0; i < C; ++i) r[i] = load_as(src + i * L);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < C; ++i) r[i] = load_first(src + i * L, from.lanes * C - i * L);
    }
    deinterleave<V, C>(r);
    if (channels == C) {
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) V::store(dst + c * to.channel_pitch, r[c]);
    } else {
      for (int64_t c = 0; c < channels; ++c) V::store(dst + c * to.channel_pitch, r[first + c]);
    }
  }
}

// A group's channel c of pixel x is planes[c][x * step + group] + bias[c * kLanes + group]. `bias` is nullptr where the
// sums have had their last addition.
template <int C, class S, class T>
void store_interleaved_of(const T* const* planes, int64_t step, const T* bias, const GroupPixels<S>& to) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  S* dst = to.data;
  for (int64_t x = 0; x < to.count; ++x, dst += to.step) {
    typename V::reg r[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) r[c] = V::load(planes[c] + x * step);
    if (bias != nullptr) {
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) r[c] = V::add(r[c], V::load(bias + c * L));
    }
    interleave<V, C>(r);
    if (to.lanes == L) {
#pragma GCC unroll 16
      for (int i = 0; i < C; ++i) store_as(dst + i * L, r[i]);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < C; ++i) store_first(dst + i * L, r[i], to.lanes * C - i * L);
    }
  }
}

template <class S, class T>
void load_interleaved(int64_t group_channels, const GroupPixels<const S>& from, int64_t first, int64_t channels,
                      const GroupPlanes<T>& to) {
  with_constant<2, 4, 8, kMaxInterleaved>(
      group_channels, [&](auto c) { load_interleaved_of<decltype(c)::value>(from, first, channels, to); });
}
template <class S, class T>
void store_interleaved(int64_t group_channels, const T* const* planes, int64_t step, const T* bias,
                       const GroupPixels<S>& to) {
  with_constant<2, 4, 8, kMaxInterleaved>(
      group_channels, [&](auto c) { store_interleaved_of<decltype(c)::value>(planes, step, bias, to); });
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
