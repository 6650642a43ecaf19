#include "report.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace gate {

const char * aspect_name(aspect a) {
    static const char * names[] = { "reserved", "computed", "inputs", "logits", "drafts", "state", "memory" };
    static_assert(sizeof(names)/sizeof(names[0]) == ASPECT_COUNT, "a name for every aspect");
    return names[a];
}

static std::FILE * open_file(const std::string & path) {
    std::FILE * file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) {
        throw std::runtime_error("cannot write " + path + ": " + std::strerror(errno));
    }
    return file;
}

report::report(const std::string & path, const std::string & dump_path) {
    file_ = open_file(path);
    if (!dump_path.empty()) {
        dump_ = open_file(dump_path);
    }
    put("opencoti-gate-probe 1");
}

report::~report() {
    std::fclose(file_);
    if (dump_ != nullptr) {
        std::fclose(dump_);
    }
}

// A crash must not take what is known already with it, so every line is flushed.
void report::put(const std::string & text) {
    std::fwrite(text.data(), 1, text.size(), file_);
    std::fputc('\n', file_);
    if (std::fflush(file_) != 0) {
        throw std::runtime_error(std::string("cannot write the results: ") + std::strerror(errno));
    }
}

void report::backend(const std::string & text) {
    put("backend\t" + one_line(text));
}

void report::begin(const std::string & config) {
    config_ = config;
    digests_.fill(sha256());
    lines_.fill(0);
    put("config\t" + config_);
}

void report::line(aspect a, const std::string & text) {
    digests_[a].update(text.data(), text.size());
    digests_[a].update("\n", 1);
    ++lines_[a];
    dump(a, text);
}

void report::bytes(aspect a, const std::string & text, const void * data, size_t size) {
    line(a, text + "\t" + std::to_string(size) + "\t" + sha256_of(data, size));
    if (dump_ != nullptr) {
        dump(a, "bytes\t" + hex_of(data, size));
    }
}

void report::dump(aspect a, const std::string & text) {
    if (dump_ == nullptr) {
        return;
    }
    std::fprintf(dump_, "%s\t%s\t", config_.c_str(), aspect_name(a));
    std::fwrite(text.data(), 1, text.size(), dump_);
    std::fputc('\n', dump_);
}

void report::finish() {
    for (int a = 0; a < ASPECT_COUNT; ++a) {
        put("hash\t" + config_ + "\t" + aspect_name(aspect(a)) + "\t" + digests_[a].hex() + "\t" + std::to_string(lines_[a]));
    }
}

void report::refuse(const std::string & reason) {
    put("refused\t" + config_ + "\t" + one_line(reason));
}

void report::absent() {
    put("absent\t" + config_);
}

void report::end() {
    put("end");
}

std::string hex_of(const void * data, size_t size) {
    const uint8_t * bytes = static_cast<const uint8_t *>(data);
    std::string     text;
    text.reserve(2*size);
    for (size_t i = 0; i < size; ++i) {
        text += "0123456789abcdef"[bytes[i] >> 4];
        text += "0123456789abcdef"[bytes[i] & 15];
    }
    return text;
}

std::string one_line(const std::string & text) {
    std::string result;
    for (const char c : text) {
        result += c == '\t' || c == '\n' || c == '\r' ? ' ' : c;
    }
    while (!result.empty() && result.back() == ' ') {
        result.pop_back();
    }
    return result;
}

} // namespace gate
