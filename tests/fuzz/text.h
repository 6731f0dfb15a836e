// Cases as text: a word for their kind, then name=value for each field that has not its default.
//
// for_each_field(c, visit) calls visit(name, number, words, count) for every field of a case: `words` are the names of
// its values, of which -1 is "any", or null where it is a number.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace conv2d_ext::fuzz {

// The first three fields are shown always.
template <class C, class Fields>
std::string write_text(const std::string& kind, C value, Fields for_each_field) {
  const auto texts_of = [&](C& c) {
    std::vector<std::string> texts;
    for_each_field(c, [&](const std::string& name, int64_t& number, const char* const* words, int) {
      const std::string shown = words == nullptr ? std::to_string(number) : number < 0 ? "any" : words[number];
      texts.push_back(" " + name + "=" + shown);
    });
    return texts;
  };
  C defaults;
  const std::vector<std::string> texts = texts_of(value), left_out = texts_of(defaults);
  std::string result = kind;
  for (size_t at = 0; at < texts.size(); ++at) {
    if (at < 3 || texts[at] != left_out[at]) result += texts[at];
  }
  return result;
}

// False where it is not the text of such a case. A # begins a comment, to the end of its line.
template <class C, class Fields>
bool read_text(const std::string& kind, const std::string& text, C& result, Fields for_each_field) {
  if (text.compare(0, kind.size(), kind) != 0) return false;
  result = C();
  for (size_t at = kind.size(); at < text.size();) {
    const size_t begin = text.find_first_not_of(" \t\r\n", at);
    if (begin == std::string::npos) break;
    if (text[begin] == '#') {
      at = text.find('\n', begin);
      if (at == std::string::npos) break;
      continue;
    }
    size_t end = text.find_first_of(" \t\r\n", begin);
    if (end == std::string::npos) end = text.size();
    at = end;
    const std::string item = text.substr(begin, end - begin);
    const size_t equals = item.find('=');
    if (equals == std::string::npos) return false;
    const std::string key = item.substr(0, equals), word = item.substr(equals + 1);
    bool known = false;
    for_each_field(result, [&](const std::string& name, int64_t& number, const char* const* words, int count) {
      if (known || name != key) return;
      if (words == nullptr) {
        number = std::strtoll(word.c_str(), nullptr, 10);
        known = true;
        return;
      }
      if (word == "any") {
        number = -1;
        known = true;
      }
      for (int i = 0; i < count; ++i) {
        if (word == words[i]) {
          number = i;
          known = true;
        }
      }
    });
    if (!known) return false;
  }
  return true;
}

// Bounds that keep a text written by hand, or mutated, from being anything but a case.
inline void clamp(int64_t& value, int64_t low, int64_t high) {
  value = value < low ? low : value > high ? high : value;
}

}  // namespace conv2d_ext::fuzz
