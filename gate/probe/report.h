#pragma once

#include "sha256.h"

#include <array>
#include <cstddef>
#include <cstdio>
#include <string>

namespace gate {

// What is compared of a configuration, each by a hash of its own.
enum aspect {
    ASPECT_RESERVED, // the graphs a context reserves its buffers with: prompt and decode
    ASPECT_COMPUTED, // the graphs that were really computed
    ASPECT_INPUTS,   // the values the host hands to them: tokens, positions, masks, cell numbers
    ASPECT_LOGITS,
    ASPECT_DRAFTS,   // hidden states given to the MTP head, tokens drafted
    ASPECT_STATE,    // the blobs of llama_state_get_data and llama_state_seq_get_data
    ASPECT_MEMORY,   // llama_get_memory_breakdown
    ASPECT_COUNT,
};

const char * aspect_name(aspect a);

// The result file, and the dump where one was asked for.
//
// Both are lines of fields with a tab between them. Results:
//
//   opencoti-gate-probe 1
//   backend   TEXT                           once: the code that computes
//   config    NAME                           before a configuration is run, so that a crash can be told apart
//   hash      NAME  ASPECT  SHA256  LINES    for every aspect of a configuration that was run
//   refused   NAME  TEXT                     the tree refuses this configuration, with its reason
//   absent    NAME                           the model has nothing to draft with
//   end
//
// The dump holds the lines that the hashes are of, each with the name of its configuration and aspect before it, and after a
// line that names the hash of some bytes one whose third field is "bytes" and whose fourth is their hex.
class report {
  public:
    // Throws std::runtime_error when a file cannot be opened. An empty name: no dump.
    report(const std::string & path, const std::string & dump_path);
    ~report();

    report(const report &) = delete;
    report & operator=(const report &) = delete;

    void backend(const std::string & text);

    void begin(const std::string & config);
    void line(aspect a, const std::string & text);
    void bytes(aspect a, const std::string & text, const void * data, size_t size); // a line: `text`, the size, the hash
    void finish();
    void refuse(const std::string & reason);
    void absent();

    void end();

  private:
    void put(const std::string & text);
    void dump(aspect a, const std::string & text);

    std::FILE * file_ = nullptr;
    std::FILE * dump_ = nullptr;
    std::string config_;

    std::array<sha256, ASPECT_COUNT> digests_;
    std::array<size_t, ASPECT_COUNT> lines_ = {};
};

// Lower-case hex of bytes.
std::string hex_of(const void * data, size_t size);

// `text` without tabs and line ends, which would end a field.
std::string one_line(const std::string & text);

} // namespace gate
