/* SPDX-License-Identifier: Apache-2.0 */
#include "elf_check.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__x86_64__)
#define HOST_MACHINE EM_X86_64
#elif defined(__aarch64__)
#define HOST_MACHINE EM_AARCH64
#else
#error "state the ELF machine of this processor"
#endif

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HOST_ORDER ELFDATA2LSB
#else
#define HOST_ORDER ELFDATA2MSB
#endif

struct image {
    const unsigned char *bytes;
    uint64_t size;
    Elf64_Ehdr header;
};

static bool fits(const uint64_t offset, const uint64_t length, const uint64_t size)
{
    return offset <= size && length <= size - offset;
}

static Elf64_Phdr read_segment(const struct image *const image, const unsigned index)
{
    Elf64_Phdr segment;
    memcpy(&segment, image->bytes + image->header.e_phoff + index * sizeof(segment),
           sizeof(segment));
    return segment;
}

// True if [address, address + length) is loaded from bytes of the file.
static bool is_loaded(const struct image *const image, const uint64_t address,
                      const uint64_t length)
{
    for (unsigned i = 0; i < image->header.e_phnum; i++) {
        const Elf64_Phdr segment = read_segment(image, i);
        if (segment.p_type == PT_LOAD && address >= segment.p_vaddr &&
            fits(address - segment.p_vaddr, length, segment.p_filesz))
            return true;
    }
    return false;
}

// True if [address, address + length) is memory of a segment that has these flags, beyond the bytes
// of the file, too.
static bool is_mapped(const struct image *const image, const uint64_t address,
                      const uint64_t length, const uint32_t flags)
{
    for (unsigned i = 0; i < image->header.e_phnum; i++) {
        const Elf64_Phdr segment = read_segment(image, i);
        if (segment.p_type == PT_LOAD && (segment.p_flags & flags) == flags &&
            address >= segment.p_vaddr && fits(address - segment.p_vaddr, length, segment.p_memsz))
            return true;
    }
    return false;
}

// The bytes that are loaded at `address`; NULL if there are none.
static const unsigned char *find_bytes(const struct image *const image, const uint64_t address)
{
    for (unsigned i = 0; i < image->header.e_phnum; i++) {
        const Elf64_Phdr segment = read_segment(image, i);
        if (segment.p_type == PT_LOAD && address >= segment.p_vaddr &&
            address - segment.p_vaddr < segment.p_filesz)
            return image->bytes + segment.p_offset + (address - segment.p_vaddr);
    }
    return NULL;
}

static const char *check_header(struct image *const image)
{
    if (image->size < sizeof(image->header)) return "is too short for an ELF file";
    memcpy(&image->header, image->bytes, sizeof(image->header));
    const Elf64_Ehdr *const header = &image->header;
    if (memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return "is not an ELF file";
    if (header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_ident[EI_DATA] != HOST_ORDER ||
        header->e_machine != HOST_MACHINE)
        return "is built for another processor";
    if (header->e_type != ET_DYN || header->e_ident[EI_VERSION] != EV_CURRENT)
        return "is not a shared object";
    if (header->e_phentsize != sizeof(Elf64_Phdr) || header->e_phnum == 0 ||
        (header->e_shnum != 0 && header->e_shentsize != sizeof(Elf64_Shdr)))
        return "has a damaged ELF header";
    if (!fits(header->e_phoff, header->e_phnum * sizeof(Elf64_Phdr), image->size) ||
        !fits(header->e_shoff, header->e_shnum * sizeof(Elf64_Shdr), image->size))
        return "is cut short: its header tables lie beyond its end";
    return NULL;
}

static const char *check_segments(const struct image *const image)
{
    bool loads = false;
    uint64_t end = 0;
    for (unsigned i = 0; i < image->header.e_phnum; i++) {
        const Elf64_Phdr segment = read_segment(image, i);
        if (segment.p_type != PT_LOAD) continue;
        if (!fits(segment.p_offset, segment.p_filesz, image->size))
            return "is cut short: a segment lies beyond its end";
        if (!(segment.p_flags & PF_R) || segment.p_filesz > segment.p_memsz ||
            segment.p_vaddr < end || !fits(segment.p_vaddr, segment.p_memsz, (uint64_t) 1 << 40) ||
            segment.p_vaddr % 4096 != segment.p_offset % 4096)
            return "has a damaged segment table";
        end = segment.p_vaddr + segment.p_memsz;
        loads = true;
    }
    return loads ? NULL : "has nothing to load";
}

// The segments that say something about others: what they point at has to be loaded.
static const char *check_notes(const struct image *const image)
{
    for (unsigned i = 0; i < image->header.e_phnum; i++) {
        const Elf64_Phdr segment = read_segment(image, i);
        bool sound = true;
        switch (segment.p_type) {
        // Some dynamic linkers go by how large they are in memory.
        case PT_DYNAMIC:
        case PT_NOTE:
        case PT_GNU_PROPERTY:
            sound = is_loaded(image, segment.p_vaddr, segment.p_filesz) &&
                    is_loaded(image, segment.p_vaddr, segment.p_memsz);
            break;
        case PT_TLS: sound = is_loaded(image, segment.p_vaddr, segment.p_filesz); break;
        // Rounded up to a page by some linkers.
        case PT_GNU_RELRO:
            sound = is_loaded(image, segment.p_vaddr, segment.p_filesz) &&
                    segment.p_memsz < segment.p_filesz + (1 << 16);
            break;
        default: break;
        }
        if (!sound) return "has a damaged segment table";
    }
    return NULL;
}

// True if the section, one that is in memory, is loaded from where it lies in the file; code as
// code.
static bool is_placed(const struct image *const image, const Elf64_Shdr *const section)
{
    for (unsigned i = 0; i < image->header.e_phnum; i++) {
        const Elf64_Phdr segment = read_segment(image, i);
        if (segment.p_type == PT_LOAD && section->sh_addr >= segment.p_vaddr &&
            fits(section->sh_addr - segment.p_vaddr, section->sh_size, segment.p_filesz))
            return section->sh_offset == segment.p_offset + (section->sh_addr - segment.p_vaddr) &&
                   (!(section->sh_flags & SHF_EXECINSTR) || (segment.p_flags & PF_X)) &&
                   (!(section->sh_flags & SHF_WRITE) || (segment.p_flags & PF_W));
    }
    return false;
}

static const char *check_sections(const struct image *const image)
{
    for (unsigned i = 0; i < image->header.e_shnum; i++) {
        Elf64_Shdr section;
        memcpy(&section, image->bytes + image->header.e_shoff + i * sizeof(section),
               sizeof(section));
        if (section.sh_type == SHT_NOBITS || section.sh_type == SHT_NULL) continue;
        if (!fits(section.sh_offset, section.sh_size, image->size))
            return "is cut short: a section lies beyond its end";
        if ((section.sh_flags & SHF_ALLOC) && !is_placed(image, &section))
            return "has a damaged segment table";
    }
    return NULL;
}

// What the dynamic linker follows.
struct dynamic {
    uint64_t strings, strings_size, symbols, hash;
    uint64_t relocations, relocations_size, plt, plt_size;
};

static bool read_dynamic(const struct image *const image, struct dynamic *const dynamic)
{
    for (unsigned i = 0; i < image->header.e_phnum; i++) {
        const Elf64_Phdr segment = read_segment(image, i);
        if (segment.p_type != PT_DYNAMIC) continue;
        const unsigned char *at = find_bytes(image, segment.p_vaddr);
        for (uint64_t n = segment.p_filesz / sizeof(Elf64_Dyn); at && n > 0; n--) {
            Elf64_Dyn entry;
            memcpy(&entry, at, sizeof(entry));
            at += sizeof(entry);
            switch (entry.d_tag) {
            case DT_NULL: return true;
            case DT_STRTAB: dynamic->strings = entry.d_un.d_ptr; break;
            case DT_STRSZ: dynamic->strings_size = entry.d_un.d_val; break;
            case DT_SYMTAB: dynamic->symbols = entry.d_un.d_ptr; break;
            // Packs are linked with this one: every linker's default for many years.
            case DT_GNU_HASH: dynamic->hash = entry.d_un.d_ptr; break;
            case DT_RELA: dynamic->relocations = entry.d_un.d_ptr; break;
            case DT_RELASZ: dynamic->relocations_size = entry.d_un.d_val; break;
            case DT_JMPREL: dynamic->plt = entry.d_un.d_ptr; break;
            case DT_PLTRELSZ: dynamic->plt_size = entry.d_un.d_val; break;
            default: break;
            }
        }
        return false;
    }
    return false;
}

static bool check_symbol(const struct image *const image, const struct dynamic *const dynamic,
                         const uint64_t index)
{
    const uint64_t address = dynamic->symbols + index * sizeof(Elf64_Sym);
    if (!is_loaded(image, address, sizeof(Elf64_Sym))) return false;
    Elf64_Sym symbol;
    memcpy(&symbol, find_bytes(image, address), sizeof(symbol));
    const bool defined = symbol.st_shndx != SHN_UNDEF && symbol.st_shndx < SHN_LORESERVE;
    return symbol.st_name < dynamic->strings_size &&
           (!defined || is_mapped(image, symbol.st_value, symbol.st_size, 0));
}

static bool check_relocations(const struct image *const image, const struct dynamic *const dynamic,
                              const uint64_t address, const uint64_t size)
{
    if (size == 0) return true;
    if (!is_loaded(image, address, size)) return false;
    const unsigned char *at = find_bytes(image, address);
    for (uint64_t n = size / sizeof(Elf64_Rela); n > 0; n--, at += sizeof(Elf64_Rela)) {
        Elf64_Rela rela;
        memcpy(&rela, at, sizeof(rela));
        // Type 0 does nothing, on every processor.
        if (ELF64_R_TYPE(rela.r_info) == 0) continue;
        if (!is_mapped(image, rela.r_offset, sizeof(uint64_t), PF_W) ||
            !check_symbol(image, dynamic, ELF64_R_SYM(rela.r_info)))
            return false;
    }
    return true;
}

static uint32_t read_word(const unsigned char *const bytes, const uint64_t index)
{
    uint32_t word;
    memcpy(&word, bytes + index * sizeof(word), sizeof(word));
    return word;
}

// A chain ends with the first odd entry.
static bool check_chain(const struct image *const image, const struct dynamic *const dynamic,
                        const uint64_t chains, const uint32_t first_symbol, const uint32_t start)
{
    for (uint64_t symbol = start;; symbol++) {
        const uint64_t entry = chains + (symbol - first_symbol) * sizeof(uint32_t);
        if (symbol < first_symbol || !is_loaded(image, entry, sizeof(uint32_t)) ||
            !check_symbol(image, dynamic, symbol))
            return false;
        if (read_word(find_bytes(image, entry), 0) & 1) return true;
    }
}

// Four words (buckets, first symbol, bloom words, shift), 64-bit bloom words, buckets, chains.
static bool check_hash(const struct image *const image, const struct dynamic *const dynamic)
{
    const uint64_t table = dynamic->hash;
    if (!is_loaded(image, table, 4 * sizeof(uint32_t))) return false;
    const unsigned char *const bytes = find_bytes(image, table);
    const uint32_t num_buckets = read_word(bytes, 0), first_symbol = read_word(bytes, 1);
    const uint64_t bloom = read_word(bytes, 2);
    const uint64_t buckets = 4 + bloom * 2, end = buckets + num_buckets;
    if (num_buckets == 0 || bloom == 0 || (bloom & (bloom - 1)) != 0 ||
        !is_loaded(image, table, end * sizeof(uint32_t)))
        return false;
    for (uint32_t i = 0; i < num_buckets; i++) {
        const uint32_t start = read_word(bytes, buckets + i);
        if (start != 0 &&
            !check_chain(image, dynamic, table + end * sizeof(uint32_t), first_symbol, start))
            return false;
    }
    return true;
}

static const char *check_dynamic(const struct image *const image)
{
    struct dynamic dynamic = { 0 };
    if (!read_dynamic(image, &dynamic)) return "has no sound dynamic section";
    if (dynamic.strings_size == 0 || !is_loaded(image, dynamic.strings, dynamic.strings_size) ||
        find_bytes(image, dynamic.strings)[dynamic.strings_size - 1] != '\0' ||
        !check_hash(image, &dynamic))
        return "has a damaged symbol table";
    if (!check_relocations(image, &dynamic, dynamic.relocations, dynamic.relocations_size) ||
        !check_relocations(image, &dynamic, dynamic.plt, dynamic.plt_size))
        return "has damaged relocations";
    return NULL;
}

static const char *check_image(struct image *const image)
{
    const char *fault = check_header(image);
    if (!fault) fault = check_segments(image);
    if (!fault) fault = check_notes(image);
    if (!fault) fault = check_sections(image);
    if (!fault) fault = check_dynamic(image);
    return fault;
}

bool attn_elf_check(const char *const path, char *const why, const size_t why_size)
{
    void *bytes = MAP_FAILED;
    struct stat file = { 0 };
    const char *fault = NULL;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &file) != 0) {
        snprintf(why, why_size, "cannot be read: %s", strerror(errno));
        goto out;
    }
    if (!S_ISREG(file.st_mode)) {
        fault = "is not a regular file";
        goto out;
    }
    if (file.st_size < (off_t) sizeof(Elf64_Ehdr)) {
        fault = "is too short for an ELF file";
        goto out;
    }
    bytes = mmap(NULL, (size_t) file.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED) {
        snprintf(why, why_size, "cannot be mapped: %s", strerror(errno));
        goto out;
    }
    struct image image = { .bytes = bytes, .size = (uint64_t) file.st_size };
    fault = check_image(&image);

out:
    if (fault) snprintf(why, why_size, "%s", fault);
    const bool sound = bytes != MAP_FAILED && !fault;
    if (bytes != MAP_FAILED) munmap(bytes, (size_t) file.st_size);
    if (fd >= 0) close(fd);
    return sound;
}
