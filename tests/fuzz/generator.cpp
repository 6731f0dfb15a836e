// The driver where there is no libFuzzer: runs the files of a corpus, then inputs from a seed.
//
//   replay FILE...            each file, a case in text or bytes
//   case TEXT                 one case
//   generate SEED COUNT SECONDS [on]   inputs SEED, SEED + 1, ... up to COUNT of them or so many seconds; `on`: goes on
//                                      after failures
//   reach SEED COUNT FILE...    drivers that the files reach, and those that explain tells of for COUNT inputs
//   collect SEED COUNT FILE...  cases, of COUNT inputs, that reach what the files do not
//   show SEED                   the case of an input
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "elements.h"
#include "harness.h"
#include "numbers.h"
#include "seams.h"

namespace conv2d_ext::fuzz {

namespace {

std::vector<uint8_t> input_of(uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> bytes(160);
  for (uint8_t& byte : bytes) byte = uint8_t(random.next());
  return bytes;
}

std::vector<uint8_t> contents(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "%s can't be read\n", path);
    std::exit(2);
  }
  return std::vector<uint8_t>(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

void show_counts(double seconds) {
  std::printf(
      "%lld cases (%lld refused, %lld too large, %lld planned), %lld calls, %lld failures, %.1f s, %.0f a second\n",
      (long long)counts.cases, (long long)counts.refused, (long long)counts.too_large, (long long)counts.plans,
      (long long)counts.calls, (long long)counts.failures, seconds, double(counts.cases) / seconds);
}

// ---- which drivers are reached
// ---------------------------------------------------------------------------------------

using Lines = std::set<std::string>;

// What explain says of a case in both formats, and what runs if it is wished; of every dtype and instruction set where
// the case names none.
struct Found {
  Lines explained, ran;
};
Found find(const Case& value, bool run) {
  Found found;
  for (const DType dtype : dtypes_present()) {
    if (value.dtype >= 0 && value.dtype != int64_t(dtype)) continue;
    for (const int isa : isas_present()) {
      if (value.isa >= 0 && value.isa != isa) continue;
      for (const bool channels_last : {false, true}) {
        Case one = value;
        one.dtype = int64_t(dtype);
        one.isa = isa;
        const Reached reached = reach(one, channels_last, run);
        if (!reached.explained.empty()) found.explained.insert(reached.explained);
        for (size_t at = 0; at < reached.ran.size();) {
          const size_t end = reached.ran.find('\n', at);
          found.ran.insert(reached.ran.substr(at, end - at));
          at = end + 1;
        }
      }
    }
  }
  return found;
}

Case drawn(uint64_t seed) {
  const std::vector<uint8_t> bytes = input_of(seed);
  Case value = decode(bytes.data(), bytes.size());
  value.dtype = value.isa = -1;
  return value;
}

Case of_file(const std::string& file) {
  const std::vector<uint8_t> bytes = contents(file.c_str());
  Case value;
  if (!parse(reinterpret_cast<const char*>(bytes.data()), bytes.size(), value)) {
    value = decode(bytes.data(), bytes.size());
  }
  return value;
}

// Which have no drivers.
bool is_of_elements(const std::string& file) {
  const std::vector<uint8_t> bytes = contents(file.c_str());
  ElementCase value;
  return parse(reinterpret_cast<const char*>(bytes.data()), bytes.size(), value);
}

void show_reach(uint64_t seed, int64_t count, const std::vector<std::string>& files) {
  Lines reached, explained;
  const auto add = [](Lines& to, const Lines& from) { to.insert(from.begin(), from.end()); };
  for (const std::string& file : files) {
    if (is_of_elements(file)) continue;
    const Found found = find(of_file(file), true);
    add(reached, found.ran);
    add(explained, found.explained);
  }
  for (int64_t i = 0; i < count; ++i) add(explained, find(drawn(seed + uint64_t(i)), false).explained);
  for (const std::string& line : reached) std::printf("reached: %s\n", line.c_str());
  for (const std::string& line : explained) {
    if (reached.count(line) == 0) std::printf("not reached: %s\n", line.c_str());
  }
  for (int isa = 0; isa < kIsas; ++isa) {
    bool present = false;
    for (const int other : isas_present()) present = present || other == isa;
    if (!present) std::printf("not checked: %s, which this machine or this build lacks\n", kIsaNames[isa]);
  }
}

// Few cases that reach, together with the files, all that `count` drawn ones would.
void collect(uint64_t seed, int64_t count, const std::vector<std::string>& files) {
  Lines reached;
  for (const std::string& file : files) {
    if (is_of_elements(file)) continue;
    const Lines ran = find(of_file(file), true).ran;
    reached.insert(ran.begin(), ran.end());
  }
  for (int64_t i = 0; i < count; ++i) {
    const Case value = drawn(seed + uint64_t(i));
    const int64_t sizes[] = {value.top,      value.bottom,   value.left,       value.right,
                             value.stride_h, value.stride_w, value.dilation_h, value.dilation_w};
    if (value.plan != 0 || *std::max_element(std::begin(sizes), std::end(sizes)) > 1000) continue;
    // Of what is drawn for its own sake nothing is kept, so that the case stays readable.
    Case plain = value;
    const Case blank;
    for (Layout& layout : plain.layout) layout = blank.layout[0];
    for (int64_t& values : plain.values) values = 0;
    plain.rounding = plain.flush = plain.limits = 0;
    plain.bias_stride = 1;
    plain.variants = blank.variants;
    const auto adds = [&] {
      const Lines explained = find(plain, false).explained;
      return std::any_of(explained.begin(), explained.end(),
                         [&](const std::string& line) { return reached.count(line) == 0; });
    };
    if (!adds()) {
      plain.limits = value.limits;  // some are reached by large problems alone, or with smaller limits
      if (plain.limits == 0 || !adds()) continue;
    }
    const Lines ran = find(plain, true).ran;
    std::string added;
    for (const std::string& line : ran) {
      if (reached.insert(line).second && added.empty()) added = line;
    }
    if (!added.empty()) std::printf("%s\t%s\n", added.c_str(), to_text(plain).c_str());
  }
}

int main(int argc, char** argv) {
  std::string input;
  current_input = &input;
  const std::string verb = argc > 1 ? argv[1] : "";
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  if (verb == "replay") {
    for (int i = 2; i < argc; ++i) {
      const std::vector<uint8_t> bytes = contents(argv[i]);
      input = argv[i];
      run_bytes(bytes.data(), bytes.size());
    }
  } else if (verb == "case" && argc == 3) {
    Case value;
    ElementCase elements;
    if (!parse(argv[2], std::strlen(argv[2]), value) && !parse(argv[2], std::strlen(argv[2]), elements)) {
      std::fprintf(stderr, "not a case: %s\n", argv[2]);
      return 2;
    }
    run_bytes(reinterpret_cast<const uint8_t*>(argv[2]), std::strlen(argv[2]));
  } else if (verb == "generate" && argc >= 5) {
    const uint64_t seed = std::strtoull(argv[2], nullptr, 10);
    const int64_t count = std::atoll(argv[3]);
    const double limit = std::atof(argv[4]);
    goes_on_after_failures = argc > 5;
    for (int64_t i = 0; i < count && seconds() < limit; ++i) {
      input = std::to_string(seed + uint64_t(i));
      const std::vector<uint8_t> bytes = input_of(seed + uint64_t(i));
      run_bytes(bytes.data(), bytes.size());
    }
  } else if (verb == "reach" && argc >= 4) {
    show_reach(std::strtoull(argv[2], nullptr, 10), std::atoll(argv[3]),
               std::vector<std::string>(argv + 4, argv + argc));
    return 0;
  } else if (verb == "collect" && argc >= 4) {
    collect(std::strtoull(argv[2], nullptr, 10), std::atoll(argv[3]), std::vector<std::string>(argv + 4, argv + argc));
    return 0;
  } else if (verb == "show" && argc == 3) {
    const std::vector<uint8_t> bytes = input_of(std::strtoull(argv[2], nullptr, 10));
    std::printf("%s\n", text_of_bytes(bytes.data(), bytes.size()).c_str());
    return 0;
  } else {
    std::fprintf(stderr,
                 "usage: replay FILE... | case TEXT | generate SEED COUNT SECONDS [on] | reach SEED COUNT FILE... | "
                 "show SEED\n");
    return 2;
  }
  show_counts(seconds());
  return counts.failures == 0 ? 0 : 1;
}

}  // namespace

}  // namespace conv2d_ext::fuzz

int main(int argc, char** argv) { return conv2d_ext::fuzz::main(argc, argv); }
