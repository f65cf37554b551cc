// A tokenizer.
#pragma once
#include "../device.h"
#include <cctype>
#include <cstring>

namespace standin::ptx {

inline bool is_name(char c) { return isalnum(c) || c == '_' || c == '$' || c == '%' || c == '.'; }

// Names and numbers come whole; comments are passed over.
class Reader {
public:
    explicit Reader(const char* text) : at(text) { next(); }

    std::string token; // the one that comes next; empty at the end
    unsigned line = 1;

    std::string take() {
        std::string taken = token;
        next();
        return taken;
    }
    bool skip(const std::string& expected) {
        bool there = token == expected;
        if (there) next();
        return there;
    }
    void expect(const std::string& expected) {
        if (!skip(expected)) fail("expected " + expected + ", found " + token);
    }
    // Skips everything up to and including a semicolon.
    void pass() {
        while (!skip(";")) {
            if (token.empty()) fail("ends too early");
            next();
        }
    }
    size_t number() {
        char* end;
        size_t value = strtoull(token.c_str(), &end, 0);
        if (token.empty() || *end) fail(token + " is no number");
        next();
        return value;
    }
    [[noreturn]] void fail(const std::string& what) const {
        throw Fault{"PTX, line " + std::to_string(line) + ": " + what};
    }

private:
    const char* at;

    void next() {
        for (;;) {
            if (*at == '\n') line++, at++;
            else if (isspace(*at)) at++;
            else if (at[0] == '/' && at[1] == '/') at += strcspn(at, "\n");
            else break;
        }
        const char* start = at;
        if (*at == '"') {
            at += 1 + strcspn(at + 1, "\"");
            at += *at == '"';
        } else if (is_name(*at)) {
            while (is_name(*at)) at++;
        } else if (*at) {
            at++;
        }
        token.assign(start, at);
    }
};

} // namespace standin::ptx
