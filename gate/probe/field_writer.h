#pragma once

#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gate {

// A string in quotes, so that an empty one and one with spaces can be seen; control characters as \xHH.
inline std::string in_quotes(const std::string & text) {
    std::string result = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            result += '\\';
            result += c;
        } else if ((unsigned char) c < 32 || c == 127) {
            result += "\\x";
            result += "0123456789abcdef"[(unsigned char) c >> 4];
            result += "0123456789abcdef"[c & 15];
        } else {
            result += c;
        }
    }
    return result + "\"";
}

class field_writer;

// Whether fields.inc knows the members of T.
template <class T, class = void> struct has_fields : std::false_type {};
template <class T> struct has_fields<T, std::void_t<decltype(each_field(std::declval<field_writer &>(), std::declval<const T &>()))>> : std::true_type {};

template <class T> struct is_sequence : std::false_type {};
template <class T> struct is_sequence<std::vector<T>> : std::true_type {};
template <class T> struct is_sequence<std::set<T>> : std::true_type {};

template <class T> struct is_map : std::false_type {};
template <class K, class V> struct is_map<std::map<K, V>> : std::true_type {};

template <class T> struct is_function : std::false_type {};
template <class T> struct is_function<std::function<T>> : std::true_type {};

// Calls `put` with the dotted name and the text of every value below a structure.
class field_writer {
  public:
    field_writer(std::string prefix, std::function<void(const std::string &, const std::string &)> put) : prefix_(std::move(prefix)), put_(std::move(put)) {}

    template <class T> void field(const char * name, const T & value) {
        if constexpr (has_fields<T>::value) {
            field_writer inner(prefix_ + "." + name, put_);
            each_field(inner, value);
        } else {
            put_(prefix_ + "." + name, text(value));
        }
    }

  private:
    // Runs of one value are written once: some lists are long and empty.
    template <class I> static std::string list(I item, I end) {
        std::string result = "[";
        while (item != end) {
            const std::string shown = text(*item);
            size_t            run   = 0;
            while (item != end && text(*item) == shown) {
                ++item;
                ++run;
            }
            result += (result.size() > 1 ? ", " : "") + shown + (run > 1 ? " x " + std::to_string(run) : "");
        }
        return result + "]";
    }

    template <class T> static std::string text(const T & value) {
        if constexpr (std::is_same_v<T, bool>) {
            return value ? "true" : "false";
        } else if constexpr (std::is_enum_v<T>) {
            return std::to_string((long long) value);
        } else if constexpr (std::is_floating_point_v<T>) {
            std::ostringstream stream;
            stream.precision(sizeof(T) > 4 ? 17 : 9); // enough to tell any two values apart
            stream << value;
            return stream.str();
        } else if constexpr (std::is_integral_v<T>) {
            return std::to_string(value);
        } else if constexpr (std::is_same_v<T, std::string>) {
            return in_quotes(value);
        } else if constexpr (std::is_array_v<T>) {
            return list(std::begin(value), std::end(value));
        } else if constexpr (is_sequence<T>::value) {
            return list(value.begin(), value.end());
        } else if constexpr (is_map<T>::value) {
            std::string result = "{";
            for (const auto & [key, item] : value) {
                result += (result.size() > 1 ? ", " : "") + text(key) + ": " + text(item);
            }
            return result + "}";
        } else if constexpr (std::is_same_v<T, const char *> || std::is_same_v<T, char *>) {
            return value != nullptr ? in_quotes(value) : "null";
        } else if constexpr (std::is_pointer_v<T>) {
            return value != nullptr ? "set" : "null";
        } else if constexpr (is_function<T>::value) {
            return value ? "set" : "null";
        } else if constexpr (has_fields<T>::value) {
            std::string  result;
            field_writer inner("", [&result](const std::string & name, const std::string & item) { result += (result.empty() ? "" : ", ") + name.substr(1) + ": " + item; });
            each_field(inner, value);
            return "(" + result + ")";
        } else {
            return "a structure of " + std::to_string(sizeof(T)) + " bytes";
        }
    }

    std::string                                                    prefix_;
    std::function<void(const std::string &, const std::string &)> put_;
};

} // namespace gate
