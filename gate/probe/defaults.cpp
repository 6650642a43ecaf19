#include "defaults.h"

#include "report.h"

#include "arg.h"
#include "common.h"
#include "llama.h"

#include "field_writer.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace gate {

// each_field() for the structures of the pristine tree's headers; the table `programs` of its llama_example values
#include "fields.inc"

namespace {

class writer {
  public:
    explicit writer(const std::string & path) : file_(std::fopen(path.c_str(), "wb")) {
        if (file_ == nullptr) {
            throw std::runtime_error("cannot write " + path + ": " + std::strerror(errno));
        }
    }
    ~writer() { std::fclose(file_); }

    writer(const writer &) = delete;
    writer & operator=(const writer &) = delete;

    template <class T> void fields(const std::string & prefix, const T & value) {
        field_writer out(prefix, [this](const std::string & name, const std::string & text) {
            put("field\t" + name + "\t" + one_line(text));
        });
        each_field(out, value);
    }

    void options(const char * program, const std::vector<common_arg> & options, llama_example example) {
        for (common_arg option : options) {
            std::string flags;
            for (const char * flag : option.args) {
                flags += (flags.empty() ? "" : " ") + std::string(flag);
            }
            for (const char * flag : option.args_neg) {
                flags += " " + std::string(flag);
            }
            const auto say = [&](const char * name, const std::string & value) {
                put(std::string("option\t") + program + "\t" + flags + "\t" + name + "\t" + one_line(value));
            };
            say("values",      std::string(option.value_hint ? option.value_hint : "") + (option.value_hint_2 ? std::string(" ") + option.value_hint_2 : ""));
            say("variable",    option.env ? option.env : "");
            say("section",     option.is_sampling ? "sampling" : option.is_spec ? "speculative" : option.in_example(example) ? "of the program" : "common");
            say("preset only", option.is_preset_only ? "yes" : "no");
            say("handler",     option.handler_void ? "flag" : option.handler_string ? "text" : option.handler_str_str ? "two texts" : option.handler_int ? "number" : option.handler_bool ? "yes or no" : "none");
            say("help",        in_quotes(option.help));
        }
    }

    void put(const std::string & line) {
        std::fwrite(line.data(), 1, line.size(), file_);
        std::fputc('\n', file_);
    }

  private:
    std::FILE * file_;
};

} // namespace

static bool knows(const std::vector<common_arg> & options, const char * flag) {
    for (const auto & option : options) {
        for (const char * known : option.args) {
            if (std::strcmp(known, flag) == 0) {
                return true;
            }
        }
    }
    return false;
}

void write_defaults(const std::string & path, const std::string & model) {
    writer out(path);
    out.fields("llama_model_params",          llama_model_default_params());
    out.fields("llama_context_params",        llama_context_default_params());
    out.fields("llama_model_quantize_params", llama_model_quantize_default_params());
    out.fields("llama_sampler_chain_params",  llama_sampler_chain_default_params());
    {
        common_params params{};
        out.fields("common_params", params);
        out.fields("llama_context_params from common_params", common_context_params_to_llama(params));
        out.fields("llama_model_params from common_params",   common_model_params_to_llama(params));
    }
    for (const auto & [name, example] : programs) {
        common_params params{};
        const auto    context = common_params_parser_init(params, example);
        out.fields(std::string(name) + " common_params", params);
        out.options(name, context.options, example);

        if (!knows(context.options, "--model")) {
            continue;
        }
        common_params parsed{};
        std::string   words[] = { "probe", "--model", model };
        char *        argv[]  = { &words[0][0], &words[1][0], &words[2][0], nullptr };
        const bool    done    = common_params_parse(3, argv, parsed, example);
        out.put("field\t" + std::string(name) + " takes an empty command line\t" + (done ? "yes" : "no"));
        out.fields(std::string(name) + " common_params of an empty command line", parsed);
        out.fields(std::string(name) + " llama_context_params of an empty command line", common_context_params_to_llama(parsed));
        out.fields(std::string(name) + " llama_model_params of an empty command line",   common_model_params_to_llama(parsed));
    }
}

} // namespace gate
