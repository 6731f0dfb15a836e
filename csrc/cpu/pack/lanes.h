// Transpositions while packing: strided memory to rows of vectors, channels_last pixels to planes.
#pragma once

#include "../isa/convert.h"

namespace conv2d_ext::cpu::CONV2D_ISA {

// What becomes a panel: `lanes` lanes of `depth` elements, element k of a lane at data[lane * lane_step + k * k_step].
template <class S>
struct LaneSource {
  const S* data;
  int64_t lane_step, k_step, lanes, depth;
};
// A panel: `width` lanes of element k at data[k * pitch]. Lanes that the source lacks become zero.
template <class T>
struct Panel {
  T* data;
  int64_t pitch, width;

  // Where element k lies, and those after it in turn.
  class Cursor {
   public:
    CONV2D_INLINE Cursor(const Panel& panel, int64_t lane, int64_t k)
        : pitch_(panel.pitch), at_(panel.data + lane + k * pitch_) {}
    CONV2D_INLINE T* next() {
      T* const at = at_;
      at_ += pitch_;
      return at;
    }

   private:
    const int64_t pitch_;
    T* at_;
  };
};
// The same with a gap after every `run` elements: rows of a patch between which there is padding.
template <class T>
struct GappedPanel : Panel<T> {
  int64_t run, gap;

  class Cursor {
   public:
    CONV2D_INLINE Cursor(const GappedPanel& panel, int64_t lane, int64_t k)
        : pitch_(panel.pitch),
          run_(panel.run),
          gap_(panel.gap),
          left_(run_ - k % run_),
          at_(panel.data + lane + k * pitch_ + k / run_ * gap_) {}
    CONV2D_INLINE T* next() {
      T* const at = at_;
      --left_;
      at_ += pitch_ + (left_ == 0 ? gap_ : 0);
      left_ = left_ == 0 ? run_ : left_;
      return at;
    }

   private:
    const int64_t pitch_, run_, gap_;
    int64_t left_;
    T* at_;
  };
};
// Which ones of every `size` elements: those whose bits are set.
struct PickedElements {
  static constexpr int64_t kMost = 64;
  int64_t size;
  uint64_t picked;
  bool has(int64_t element) const { return (picked >> element & 1) != 0; }
  int64_t before(int64_t element) const { return __builtin_popcountll(picked & ((uint64_t{1} << element) - 1)); }
  int64_t count() const { return __builtin_popcountll(picked); }
};
// A panel of such elements alone.
template <class T>
struct PickedPanel : Panel<T> {
  PickedElements elements;

  class Cursor {
   public:
    CONV2D_INLINE Cursor(const PickedPanel& panel, int64_t lane, int64_t k)
        : pitch_(panel.pitch),
          elements_(panel.elements),
          element_(k % elements_.size),
          at_(panel.data + lane + (k / elements_.size * elements_.count() + elements_.before(element_)) * pitch_) {}
    CONV2D_INLINE T* next() {
      const bool picked = elements_.has(element_);
      T* const at = picked ? at_ : others_;
      at_ += picked ? pitch_ : 0;
      element_ = element_ + 1 == elements_.size ? 0 : element_ + 1;
      return at;
    }

   private:
    const int64_t pitch_;
    const PickedElements elements_;
    int64_t element_;
    T* at_;
    T others_[Vec<T>::kLanes];  // written, and never read
  };
};

// n elements of a lane from `p` on, kStep apart: a vector of them, or fewer.
template <class T, int kStep, class S>
CONV2D_INLINE typename Vec<T>::reg load_elements(const S* p, int n) {
  if constexpr (kStep == 3) {
    return load_thirds_as_float(p, n);
  } else {
    return load_first(p, n);
  }
}

// Of elements kStep apart (k_step), by kLanes x kLanes blocks in registers. Where depth is no multiple of kLanes, the
// last block overlaps the one before it.
template <class T, int kStep = 1, class S, class Target>
CONV2D_INLINE void pack_transposed(const LaneSource<S>& from, const Target& to) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  const int64_t lane_step = from.lane_step, depth = from.depth;
  for (int64_t lane = 0; lane < to.width; lane += L) {
    const int64_t valid = min64(from.lanes - lane, L);
    const S* const s = from.data + lane * lane_step;
    if (valid <= 0) {
      typename Target::Cursor cursor(to, lane, 0);
      for (int64_t k = 0; k < depth; ++k) V::store(cursor.next(), V::zero());
      continue;
    }
    for (int64_t k0 = 0; k0 < depth; k0 += L) {
      const int64_t k = depth - k0 >= L ? k0 : max64(depth - L, 0);
      typename V::reg r[L];
      if (depth < L) {
        for (int i = 0; i < L; ++i) {
          r[i] = i < valid ? load_elements<T, kStep>(s + i * lane_step, int(depth)) : V::zero();
        }
      } else if (valid == L) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          r[i] = load_elements<T, kStep>(s + i * lane_step + k * kStep, L);
          __builtin_prefetch(s + i * lane_step + (k + depth) * kStep);
        }
      } else {
        for (int i = 0; i < L; ++i) {
          r[i] = i < valid ? load_elements<T, kStep>(s + i * lane_step + k * kStep, L) : V::zero();
        }
      }
      V::transpose(r);
      const int64_t n = min64(depth, L);
      typename Target::Cursor cursor(to, lane, k);
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        if (i < n) V::store(cursor.next(), r[i]);
      }
    }
  }
}

// Four neighbouring elements of each lane become four vectors of lanes. load(lane): a vector that begins with them.
template <class T, class Load>
CONV2D_INLINE void pack_fours(int64_t lanes, void* to, const Load& load) {
  using V = Vec<T>;
  typename V::reg r[4];
  if (lanes == V::kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) r[i] = V::of_quads(load(i), load(i + 4), load(i + 8), load(i + 12));
  } else {
    const auto some = [&](int lane) CONV2D_INLINE_LAMBDA { return lane < lanes ? load(lane) : V::zero(); };
    for (int i = 0; i < 4; ++i) r[i] = V::of_quads(some(i), some(i + 4), some(i + 8), some(i + 12));
  }
  V::transpose_quads(r);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) V::store(static_cast<T*>(to) + i * V::kLanes, r[i]);
}

// Whether panels whose lanes are groups may be packed like that, and whether one of so many result channels is, which
// lie `step` apart.
template <class T>
constexpr bool kPacksFours = kHasMasks && std::is_same_v<T, float>;
CONV2D_INLINE bool packs_fours(int64_t vectors, int64_t step) { return vectors == 4 && step == 1; }

// Steps of k ahead of which the packers ask for lanes that hardware prefetchers don't see coming.
constexpr int64_t kStepsAhead = 8;

// The same for steps that are copied, which take a few instructions each.
constexpr int64_t kCopiesAhead = 32;

// Asks for the lines of `lanes` elements that are lane_step apart.
template <class S>
CONV2D_INLINE void prefetch_lanes(const S* src, int64_t lane_step, int64_t lanes) {
  const int64_t apart = max64(int64_t(64 / sizeof(S)), lane_step);
  for (int64_t i = 0; i < lanes * lane_step; i += apart) __builtin_prefetch(src + i);
}

// Asks L2 for the lines of some elements of each of so many rows.
template <class S>
CONV2D_INLINE void prefetch_row_parts(const S* src, int64_t row_step, int64_t rows, const Interval& elements) {
  if (elements.count() <= 0) return;
  for (int64_t row = 0; row < rows; ++row) {
    const char* const first = reinterpret_cast<const char*>(src + row * row_step + elements.begin);
    const int64_t bytes = elements.count() * int64_t(sizeof(S)), before = reinterpret_cast<uintptr_t>(first) % 64;
    for (int64_t i = -before; i < bytes; i += 64) __builtin_prefetch(first + i, 0, 2);
  }
}

// A panel of lanes, of any strides.
template <class S, class T>
CONV2D_INLINE void pack_lanes(const LaneSource<S>& from, const Panel<T>& to, bool conj) {
  constexpr int L = Vec<T>::kLanes;
  const int64_t lane_step = from.lane_step, k_step = from.k_step, lanes = from.lanes, depth = from.depth;
  const int64_t dst_pitch = to.pitch, width = to.width;
  const S* src = from.data;
  T* dst = to.data;
  if constexpr (kHasTranspose<T>) {
    const bool far_apart = k_step >= int64_t(64 / sizeof(S));
    if (lane_step == 1) {
      const int64_t last_ahead = far_apart ? depth - kCopiesAhead : 0;
      for (int64_t k = 0; k < depth; ++k, dst += dst_pitch, src += k_step) {
        if (k < last_ahead) prefetch_lanes(src + kCopiesAhead * k_step, 1, lanes);
        copy_run(src, 1, lanes, dst, false);
        fill_zero(dst + lanes, width - lanes);
      }
      return;
    }
    if (k_step == 1 && depth >= L / 4) {
      pack_transposed<T>(from, to);
      return;
    }
    if constexpr (kLoadsThirds<S> && std::is_same_v<T, float>) {
      if (k_step == 3 && depth >= L / 4) return pack_transposed<T, 3>(from, to);
    }
    // Steps of k that lie pages apart: what is needed is asked for early, so that the page tables are searched
    // meanwhile.
    const int64_t whole = lanes / L * L, last_ahead = far_apart ? depth - kStepsAhead : 0;
    for (int64_t k = 0; k < depth; ++k, dst += dst_pitch, src += k_step) {
      if (k < last_ahead) prefetch_lanes(src + kStepsAhead * k_step, lane_step, lanes);
      const S* s = src;
      for (int64_t lane = 0; lane < whole; lane += L, s += L * lane_step) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) dst[lane + i] = widen_scalar(s[i * lane_step]);
      }
      for (int64_t lane = whole; lane < width; ++lane) {
        dst[lane] = lane < lanes ? widen_scalar(src[lane * lane_step]) : T{};
      }
    }
    return;
  }
  for (int64_t k = 0; k < depth; ++k, dst += dst_pitch, src += k_step) {
    for (int64_t lane = 0; lane < width; ++lane) {
      const T value = lane < lanes ? widen_scalar(src[lane * lane_step]) : T{};
      set_lane(dst, lane, conj ? conjugate(value) : value);
    }
  }
}

// How far ahead pack_planes asks for source memory.
constexpr int64_t kPrefetchedBytes = 8192;

// pack_planes where count < kLanes <= channels (float).
template <class S, class T>
CONV2D_INLINE void pack_few_pixels(const S* src, int64_t step, int64_t count, int64_t channels, T* dst,
                                   int64_t dst_pitch, int64_t ahead) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  for (int64_t c0 = 0; c0 < channels; c0 += L) {
    const int64_t c = min64(c0, channels - L);
    const S* const s = src + c;
    T* const d = dst + c * dst_pitch;
    if (count < 4) {
      for (int64_t x = 0; x < count; ++x) {
        for (int i = 0; i < L; ++i) d[i * dst_pitch + x] = widen_scalar(s[x * step + i]);
      }
      continue;
    }
    // Four at a time, of which the last ones overlap those before.
    for (int64_t x0 = 0; x0 < count; x0 += 4) {
      const int64_t x = min64(x0, count - 4);
      typename V::reg r[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        r[i] = load_as(s + (x + i) * step);
        __builtin_prefetch(s + (x + i) * step + ahead);
      }
      V::transpose_quads(r);
      V::store_quads(r, d + x, dst_pitch);
    }
  }
}

// dst[c * dst_pitch + x] = src[x * step + c] for x < count and `channels` contiguous c: pixels whose channels lie
// together become planes. Nothing but these elements is written: at the end of a plane the next row or plane follows.
template <class S, class T>
CONV2D_INLINE void pack_planes(const S* src, int64_t step, int64_t count, int64_t channels, T* dst, int64_t dst_pitch) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  // A block takes lines from many pixels, which hardware prefetchers follow badly.
  const int64_t ahead = step > 0 ? max64(L, div_up(kPrefetchedBytes / int64_t(sizeof(S)), step)) * step : 0;
  if (count >= L && channels >= L) {
    // Whole blocks only: the last one overlaps the one before it, in either direction.
    for (int64_t x0 = 0; x0 < count; x0 += L) {
      const int64_t x = min64(x0, count - L);
      for (int64_t c0 = 0; c0 < channels; c0 += L) {
        const int64_t c = min64(c0, channels - L);
        const S* const s = src + x * step + c;
        typename V::reg r[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
          r[i] = load_as(s + i * step);
          __builtin_prefetch(s + i * step + ahead);
        }
        V::transpose(r);
        T* const d = dst + c * dst_pitch + x;
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) V::store(d + i * dst_pitch, r[i]);
      }
    }
    return;
  }
  if constexpr (std::is_same_v<T, float>) {
    // Whole blocks would be partly empty.
    if (channels >= L) return pack_few_pixels(src, step, count, channels, dst, dst_pitch, ahead);
  }
  const int pixels = int(min64(count, L)), planes = int(min64(channels, L));
  for (int64_t x0 = 0; x0 < count; x0 += L) {
    const int64_t x = min64(x0, count - pixels);
    // A pixel of few channels is loaded with what follows it, as far as that belongs to the run.
    const int64_t readable = (count - 1 - x) * step + channels;
    for (int64_t c0 = 0; c0 < channels; c0 += L) {
      const int64_t c = min64(c0, channels - planes);
      const S* const s = src + x * step;
      typename V::reg r[L];
      for (int i = 0; i < L; ++i) {
        const int64_t at = i * step + c;
        r[i] = i >= pixels ? V::zero() : at + L <= readable ? load_as(s + at) : load_as_partial(s + at, planes);
      }
      V::transpose(r);
      T* const d = dst + c * dst_pitch + x;
#pragma GCC unroll 16
      for (int i = 0; i < L; ++i) {
        if (i < planes) V::store_partial(d + i * dst_pitch, r[i], pixels);
      }
    }
  }
}

}  // namespace conv2d_ext::cpu::CONV2D_ISA
