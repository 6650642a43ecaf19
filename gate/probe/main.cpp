// The probe of "off means off": what a llama.cpp tree does with a model, as hashes to compare with those of another tree.
//
//   opencoti-gate-probe defaults --out FILE --model FILE
//   opencoti-gate-probe run --out FILE [--dump FILE] --model FILE [--drafter FILE] [--SIZE N]... CONFIGURATION...
//
// report.h says what `run` writes, workload.h what the sizes and configurations are, defaults.h what `defaults` writes.

#include "defaults.h"
#include "report.h"
#include "workload.h"

#include "common.h"
#include "ggml-backend.h"
#include "llama.h"
#include "log.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__GLIBC__)
#    include <malloc.h>
#endif

namespace gate {

// Some inputs of a graph are left unset where nothing reads them. Fresh memory is filled, so that what they hold is the same
// in every run.
static void fill_fresh_memory() {
#if defined(__GLIBC__)
    mallopt(M_PERTURB, 0xa5);
#endif
}

// The code that computes: the devices, and what the one for the processor was compiled for.
static std::string backend_text() {
    std::string text;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        text += std::string(ggml_backend_dev_name(ggml_backend_dev_get(i))) + " | ";
    }
    return text + llama_print_system_info();
}

static int probe_main(const std::vector<std::string> & words) {
    settings                   set;
    std::string                out_path;
    std::string                dump_path;
    std::vector<configuration> configurations;

    const std::map<std::string, std::string *> texts = {
        { "--out", &out_path }, { "--dump", &dump_path }, { "--model", &set.model }, { "--drafter", &set.drafter },
    };
    const std::map<std::string, int *> sizes = {
        { "--context", &set.n_ctx_seq }, { "--batch", &set.n_batch }, { "--ubatch", &set.n_ubatch }, { "--prompt", &set.n_prompt },
        { "--max-window", &set.max_window }, { "--decode", &set.n_decode }, { "--rounds", &set.n_round },
    };
    if (words.empty() || (words[0] != "run" && words[0] != "defaults")) {
        throw std::invalid_argument("the first word is 'run' or 'defaults'");
    }
    for (size_t i = 1; i < words.size(); ++i) {
        if (words[i].compare(0, 2, "--") != 0) {
            configurations.push_back(configuration::parse(words[i]));
            continue;
        }
        const auto text = texts.find(words[i]);
        const auto size = sizes.find(words[i]);
        if ((text == texts.end() && size == sizes.end()) || i + 1 == words.size()) {
            throw std::invalid_argument(words[i] + " is not known, or lacks its value");
        }
        ++i;
        if (text != texts.end()) {
            *text->second = words[i];
        } else {
            *size->second = std::stoi(words[i]);
        }
    }
    if (out_path.empty() || set.model.empty()) {
        throw std::invalid_argument("--out and --model are needed");
    }

    fill_fresh_memory();
    common_log_set_verbosity_thold(-1);
    llama_backend_init();
    if (words[0] == "defaults") {
        write_defaults(out_path, set.model);
    } else {
        report out(out_path, dump_path);
        models loaded(set);
        out.backend(backend_text());
        for (const auto & config : configurations) {
            run(out, loaded, set, config);
        }
        out.end();
    }
    llama_backend_free();
    return 0;
}

} // namespace gate

int main(int argc, char ** argv) {
    try {
        return gate::probe_main(std::vector<std::string>(argv + 1, argv + argc));
    } catch (const std::exception & problem) {
        std::fprintf(stderr, "opencoti-gate-probe: %s\n", problem.what());
        return 1;
    }
}
