// pack/store.h.
#pragma once

#include "../../../csrc/cpu/pack/store.h"
#include "arithmetic.h"

namespace parts {

// What lies between a tile's elements may not be touched, not even with what is there already: where whole words of the
// sanitizer's lie between, they are poisoned.
template <class S>
void poison_between(Result<S>& dst, const std::vector<bool>& written, bool poison) {
  for (int64_t i = 0; i < dst.actual.size();) {
    int64_t end = i;
    while (end < dst.actual.size() && !written[size_t(end)]) ++end;
    if (end == i) {
      ++i;
      continue;
    }
    char* low = reinterpret_cast<char*>(dst.data() + i);
    char* const high = reinterpret_cast<char*>(dst.data() + end);
    low += (8 - reinterpret_cast<uintptr_t>(low) % 8) % 8;
    const int64_t whole = (high - low) / 8 * 8;
    if (whole > 0 && poison) ASAN_POISON_MEMORY_REGION(low, size_t(whole));
    if (whole > 0 && !poison) ASAN_UNPOISON_MEMORY_REGION(low, size_t(whole));
    i = end;
  }
}

template <class S>
void check_store_tile() {
  using T = ComputeType<S>;
  constexpr int64_t L = Vec<T>::kLanes;
  begin_part(std::string("store_tile ") + kNameOf<S>);
  Random random(40);
  for (int64_t channels = 1; channels <= 2 * L + 1; channels += channels < L ? 1 : random.between(1, L / 2)) {
    for (int64_t count = 1; count <= 2 * L + 3; count += random.between(1, kHasTranspose<T> ? 2 : 5)) {
      const int64_t kinds[][2] = {{1, count + 2},     {channels, 1},     {channels + 4, 1}, {2, 2 * count},
                                  {2, 2 * count + 3}, {3, 3 * count},    {3 * channels, 3}, {1, -count - 1},
                                  {-channels, 1},     {4, 4 * count + 1}};
      for (const auto& kind : kinds) {
        const int64_t x_step = kind[0], m_step = kind[1], width = round_up(channels, L);
        const Between between = random.once_in(2) ? Between::kOwned : Between::kOthers;
        const bool has_bias = random.once_in(2);
        const int64_t c_pitch = width + (kIsComplex<T> ? 0 : random.between(0, 3));
        describe("%d pixels %d apart, %d channels %d apart, bias %d, %s", int(count), int(x_step), int(channels),
                 int(m_step), has_bias, between == Between::kOwned ? "owned" : "others");
        const Dimension to[] = {{count, x_step}, {channels, m_step}};
        int64_t before = 0, elements = 0;
        span_of(to, before, elements);
        Buffer<T> c((count - 1) * c_pitch + width), bias(width);
        Result<S> dst(elements);
        fill(c, random);
        fill(bias, random);
        // Also what a sum becomes that has underflowed.
        put(c.data(), 0, conjugated(T{}, false));
        if constexpr (std::is_floating_point_v<T>) c[0] = -T(0);
        // Numbers between, so that one that is moved shows.
        fill(dst, random);
        std::vector<bool> written(static_cast<size_t>(elements));
        for (int64_t x = 0; x < count; ++x) {
          for (int64_t m = 0; m < channels; ++m) {
            const size_t at = size_t(before + x * x_step + m * m_step);
            written[at] = true;
            dst.expected[at] = narrowed<S>(add(get(c.data() + x * c_pitch, m), has_bias ? get(bias.data(), m) : T{}));
          }
        }
        if (between == Between::kOthers) poison_between(dst, written, true);
        store_tile(TileSums<T>{c.data(), c_pitch, count, channels, has_bias ? bias.data() : nullptr},
                   TileTarget<S>{dst.data() + before, x_step, m_step}, between);
        if (between == Between::kOthers) poison_between(dst, written, false);
        dst.compare();
      }
    }
  }
}

// Planes whose pixels' sums lie in another order.
template <class S>
void check_store_placed() {
  using T = ComputeType<S>;
  constexpr int64_t L = Vec<T>::kLanes;
  begin_part(std::string("store_planes of placed sums ") + kNameOf<S>);
  Random random(44);
  for (int64_t pixels = 1; pixels <= 4 * L + 3; ++pixels) {
    const int64_t channels = random.between(1, 2 * L + 1), width = round_up(channels, L);
    const int64_t pitch = width + L * random.between(0, 1), m_step = pixels + random.between(0, 3);
    const bool has_bias = random.once_in(2);
    describe("%d pixels, %d channels %d apart, bias %d", int(pixels), int(channels), int(m_step), has_bias);
    Buffer<T> sums((pixels - 1) * pitch + width), bias(width);
    fill(sums, random);
    fill(bias, random);
    Buffer<int64_t> places(pixels);
    for (int64_t x = 0; x < pixels; ++x) {
      const int64_t other = random.between(0, x);
      places[x] = places[other];
      places[other] = x;
    }
    Result<S> dst((channels - 1) * m_step + pixels);
    fill(dst, random);
    for (int64_t x = 0; x < pixels; ++x) {
      for (int64_t m = 0; m < channels; ++m) {
        const T sum = get(sums.data() + places[x] * pitch, m);
        dst.expected[size_t(m * m_step + x)] = narrowed<S>(add(sum, has_bias ? get(bias.data(), m) : T{}));
      }
    }
    PlacedSums<T> placed{{sums.data(), pitch, pixels, channels, has_bias ? bias.data() : nullptr}, places.data()};
    store_planes<1>(placed, TileTarget<S>{dst.data(), 1, m_step});
    dst.compare();
  }
}

template <class S>
void check_store_row() {
  using T = ComputeType<S>;
  constexpr int64_t L = Vec<T>::kLanes;
  begin_part(std::string("store_row ") + kNameOf<S>);
  Random random(41);
  for (int64_t n = 0; n <= 3 * L + 1; ++n) {
    describe("%d elements", int(n));
    Buffer<T> sums(round_up(n, L));
    Result<S> dst(n);
    fill(sums, random);
    const T bias = any_value<T>(random);
    store_row<S, T>(sums.data(), Vec<T>::broadcast(&bias), n, dst.data());
    for (int64_t i = 0; i < n; ++i) dst.expected[size_t(i)] = narrowed<S>(add(sums[i], bias));
    dst.compare();
  }
}

// A piece of a destination, whose rows may continue one another.
template <class S>
void check_store_lanes() {
  using T = ComputeType<S>;
  constexpr int64_t L = Vec<T>::kLanes;
  begin_part(std::string("store_lanes ") + kNameOf<S>);
  Random random(42);
  for (int n = 0; n < 200; ++n) {
    // The destination: images x channels x rows x cols, planes or channels_last, maybe one column in two of it.
    const int64_t gap = random.between(1, 2), channel_step = random.between(1, 2);
    const int64_t lanes = random.between(1, 2 * L + 2), channel = random.between(0, 2), width = round_up(lanes, L);
    Dimension d[] = {{random.between(1, 3), 0},
                     {channel + (lanes - 1) * channel_step + 1, 0},
                     {random.between(1, 5), 0},
                     {random.between(1, 9), 0}};
    constexpr int kPlanes[] = {3, 2, 1, 0}, kChannelsLast[] = {1, 3, 2, 0};
    if (random.once_in(2)) {
      lay_out(d, kPlanes, {gap, random.between(1, 2), 1, 1});
    } else {
      lay_out(d, kChannelsLast, {1, gap, 1, 1});
    }
    const int64_t image0 = random.between(0, d[0].size - 1), row0 = random.between(0, d[2].size - 1);
    const int64_t col0 = random.once_in(2) ? 0 : random.between(0, d[3].size - 1);
    const Tile tile{image0, d[0].size - image0, row0, d[2].size - row0, col0, d[3].size - col0};
    // Rows of sums, and images, may have gaps behind them.
    const int64_t row_gap = random.once_in(2) ? 0 : random.between(1, 3);
    const int64_t image_gap = random.once_in(2) ? row_gap : random.between(0, 5);
    const SumPitches pitches{tile.cols + row_gap, tile.rows * (tile.cols + row_gap) - row_gap + image_gap};
    const int64_t all = tile.images * pitches.image, first = random.between(0, all - 1);
    const int64_t count = random.between(1, all - first);
    int64_t before = 0, elements = 0;
    span_of(d, before, elements);
    Buffer<T> c(count * width), bias(width);
    Result<S> dst(elements);
    fill(c, random);
    fill(bias, random);
    fill(dst, random);
    ConvGemm gemm{};
    gemm.rows = d[2].size;
    gemm.cols = d[3].size;
    gemm.destination = dst.data();
    gemm.destination_n = d[0].stride;
    gemm.destination_m = d[1].stride;
    gemm.destination_row = d[2].stride;
    gemm.destination_col = d[3].stride;
    gemm.owns_columns_between = gap == 2 && random.once_in(2);
    describe("%d of %d sums from %d, pitches %d, %d, strides %d, %d, %d, %d", int(count), int(all), int(first),
             int(pitches.row), int(pitches.image), int(d[0].stride), int(d[1].stride), int(d[2].stride),
             int(d[3].stride));
    const TileSums<T> sums{c.data(), width, count, lanes, bias.data()};
    const ResultPiece piece{0, 1, tile};
    if (row_gap == 0 && image_gap == 0) {
      store_lanes<S, T>(gemm, piece, first, sums, channel, channel_step);
    } else {
      store_lanes<S, T>(gemm, piece, pitches, first, sums, channel, channel_step);
    }
    for (int64_t x = first; x < first + count; ++x) {
      const int64_t row = x % pitches.image / pitches.row, col = x % pitches.image % pitches.row;
      if (row >= tile.rows || col >= tile.cols) continue;
      const int64_t image = image0 + x / pitches.image;
      for (int64_t l = 0; l < lanes; ++l) {
        dst.expected[size_t(image * d[0].stride + (channel + l * channel_step) * d[1].stride +
                            (row0 + row) * d[2].stride + (col0 + col) * d[3].stride)] =
            narrowed<S>(add(get(c.data() + (x - first) * width, l), get(bias.data(), l)));
      }
    }
    dst.compare();
  }
}

// What an addition loses, from arithmetic that is wide enough to be exact.
template <class T>
T lost_by(T a, T b) {
  return T((__float128(a) + __float128(b)) - __float128(T(a + b)));
}
template <class T>
void check_chunks() {
  begin_part(std::string("add_chunk ") + kNameOf<T>);
  Random random(43);
  for (int64_t n = 0; n <= 67; n += random.between(1, 3)) {
    describe("%d elements", int(n));
    Result<T> total(n), lost(n), sum(n);
    for (int number = 0; number < 6; ++number) {
      Buffer<T> chunk(n);
      fill(chunk, random);
      // Either summand may be the larger one.
      for (int64_t i = 0; i < n; ++i) {
        if constexpr (std::is_floating_point_v<T>) chunk[i] = std::ldexp(chunk[i], int(random.between(-12, 12)));
      }
      add_chunk(total.data(), lost.data(), chunk.data(), n, number == 0);
      for (int64_t i = 0; i < n; ++i) {
        T& a = total.expected[size_t(i)];
        T& e = lost.expected[size_t(i)];
        if (number == 0) {
          a = chunk[i];
          e = T{};
          continue;
        }
        if constexpr (std::is_floating_point_v<T>) e = T(e + lost_by(a, chunk[i]));
        a = add(a, chunk[i]);
      }
      total.compare();
      lost.compare();
    }
    finish_chunks(sum.data(), total.data(), lost.data(), n);
    for (int64_t i = 0; i < n; ++i) sum.expected[size_t(i)] = add(total.expected[size_t(i)], lost.expected[size_t(i)]);
    sum.compare();
  }
  if constexpr (std::is_floating_point_v<T>) {
    describe("infinities");
    const T infinity = std::numeric_limits<T>::infinity();
    T total = 1, lost = 0, sum = 0;
    add_chunk(&total, &lost, &infinity, 1, false);
    finish_chunks(&sum, &total, &lost, 1);
    expect(sum == infinity, "the sum of an infinity");
  }
}

}  // namespace parts
