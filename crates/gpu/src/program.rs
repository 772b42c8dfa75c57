//! Kernels from source: assembled, compiled for this chip, kept on disk.
//!
//! A program is one file of `kernels/` with its `-D` options. It is compiled when something that needs it is loaded, by
//! one of as many threads as there are cores, and awaited when it is first launched. The machine code is kept in a
//! folder under a name made of everything that went into it, so a changed kernel, option, chip or compiler is another
//! file. A folder that cannot be written costs the time to compile, nothing else.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use fornax_compute::Error;
use sha2::{Digest, Sha256};

use crate::abi;
use crate::driver::{Abilities, CLUSTER_USUAL, Chip, Compiler, Device, Function, Module, Source};
use crate::layout::Format;
use crate::pool::{Job, Pool};

macro_rules! kernels {
    ($($name:literal),* $(,)?) => { &[$(($name, include_str!(concat!("../kernels/", $name)))),*] };
}

/// Every file that may be included.
pub(crate) const HEADERS: &[(&str, &str)] = kernels![
    "prelude.cuh",
    "chip/nvidia.cuh",
    "chip/nvidia_wgmma.cuh",
    "activation.cuh",
    "attention.cuh",
    "experts.cuh",
    "head_products.cuh",
    "latent.cuh",
    "result.cuh",
    "rope.cuh",
    "form.cuh",
    "float8.cuh",
    "kv.cuh",
    "bulk.cuh",
    "quant/tile.cuh",
    "quant/blocks32.cuh",
    "quant/superblocks.cuh",
    "quant/halves.cuh",
    "quant/f32.cuh",
    "quant/f16.cuh",
    "quant/bf16.cuh",
    "quant/q4_0.cuh",
    "quant/q4_1.cuh",
    "quant/q5_0.cuh",
    "quant/q5_1.cuh",
    "quant/q8_0.cuh",
    "quant/q4_k.cuh",
    "quant/q5_k.cuh",
    "quant/q6_k.cuh",
    "quant/mxfp8.cuh",
    "quant/fp8_128.cuh",
    "quant/fp8_a8.cuh",
    "quant/coded.cuh",
];

/// Every file that is compiled.
pub(crate) const UNITS: &[(&str, &str)] = kernels![
    "attention.cu",
    "attention_f32.cu",
    "attention_rows.cu",
    "attention_wgmma.cu",
    "embed.cu",
    "expert_f32.cu",
    "expert_rows.cu",
    "experts.cu",
    "form.cu",
    "gemm.cu",
    "gemm_few.cu",
    "gemv.cu",
    "gemv_f32.cu",
    "glu.cu",
    "head_products.cu",
    "head_products_f32.cu",
    "latent.cu",
    "latent_f32.cu",
    "latent_merge.cu",
    "latent_wgmma.cu",
    "low_rank.cu",
    "norm.cu",
    "pack.cu",
    "rate.cu",
    "recurrence.cu",
    "ring.cu",
    "rope.cu",
    "rows.cu",
    "sample.cu",
];

/// The files as they are compiled, with assertions about what they share with Rust.
struct Checked {
    headers: Vec<(&'static str, String)>,
    units: Vec<(&'static str, String)>,
}

static CHECKED: LazyLock<Checked> = LazyLock::new(|| {
    let checked = |files: &[(&'static str, &str)]| {
        files.iter().map(|&(name, text)| (name, abi::checked(name, text))).collect()
    };
    Checked { headers: checked(HEADERS), units: checked(UNITS) }
});

/// A file and its definitions (`NAME=VALUE`).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) unit: &'static str,
    pub(crate) defines: Vec<String>,
}

impl Key {
    pub(crate) fn plain(unit: &'static str) -> Key {
        Key { unit, defines: Vec::new() }
    }

    /// For weights of one format.
    pub(crate) fn quant(unit: &'static str, format: Format) -> Key {
        let mut defines = vec![format!("QUANT=\"{}\"", format.header())];
        defines.extend(format.defines());
        Key { unit, defines }
    }

    fn source(&self) -> Source<'static> {
        let (name, text) =
            CHECKED.units.iter().find(|(name, _)| *name == self.unit).expect("a file of kernels/");
        Source { name, text, headers: &CHECKED.headers }
    }

    /// Options of the compiler: which chip, and the host's idea of the chip's abilities, which `kernels/chip` compares
    /// with its own. No option changes how a kernel rounds.
    fn options(&self, Chip { target, abilities, .. }: &Chip) -> Vec<String> {
        let Abilities { wgmma, bulk_copies, clusters_max, .. } = *abilities;
        let mut options = vec![
            format!("--gpu-architecture={target}"),
            "--std=c++17".to_owned(),
            "--generate-line-info".to_owned(),
        ];
        let able = [("WGMMA", wgmma), ("BULK", bulk_copies), ("CLUSTERS", clusters_max > 1)];
        options.extend(able.map(|(name, able)| format!("-DABLE_{name}={}", i32::from(able))));
        options.extend(self.defines.iter().map(|define| format!("-D{define}")));
        options
    }

    /// Roughly how long it takes to compile, as measured for Hopper: the longest start first.
    fn cost_ms(&self) -> usize {
        let number = |name: &str| {
            let define = self.defines.iter().find_map(|define| define.strip_prefix(name)?.strip_prefix('='));
            define.and_then(|number| number.parse().ok()).unwrap_or(0usize)
        };
        match self.unit {
            "sample.cu" => 500 + 600 * number("CUTS"),
            "form.cu" => 600,
            "attention_wgmma.cu" => 900,
            "gemm.cu" => (100 + 4 * number("WIDTH")) / (1 + number("GATES")),
            unit if unit.starts_with("attention") => 600,
            "gemm_few.cu" => 220 + number("WIDTH"),
            "gemv.cu" | "expert_rows.cu" | "head_products.cu" => 200,
            "latent.cu" | "latent_wgmma.cu" => 500,
            "recurrence.cu" => 500,
            _ => 100,
        }
    }

    /// The file name of its machine code: a digest of everything that the code depends on.
    fn digest(&self, chip: &Chip, (major, minor): (i32, i32)) -> String {
        let mut hash = Sha256::new();
        let source = self.source();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(&format!("{major}.{minor}"));
        self.options(chip).iter().for_each(|option| add(option));
        add(source.name);
        add(source.text);
        for (name, text) in source.headers {
            add(name);
            add(text);
        }
        let digest = hash.finalize();
        digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Machine code from the folder; otherwise it is compiled and stored there.
    fn image(&self, chip: &Chip, folder: Option<&Path>, compiler: Compiler) -> Result<Vec<u8>, String> {
        let version = (compiler.version)()?;
        let path = folder.map(|folder| folder.join(format!("{}.cubin", self.digest(chip, version))));
        if let Some(image) =
            path.as_deref().and_then(|path| std::fs::read(path).ok()).filter(|image| is_whole(image))
        {
            return Ok(image);
        }
        let image = (compiler.compile)(&self.source(), &self.options(chip))?;
        if let Some(path) = path {
            // If two write at the same time, they write the same bytes, and a reader never sees half a file. The
            // temporary name is unique, also among processes and containers that share the folder.
            static WRITTEN: AtomicUsize = AtomicUsize::new(0);
            let (process, number) = (std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed));
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
            let own = path.with_extension(format!("{process}-{number}-{now}"));
            let kept = std::fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))
                .and_then(|()| File::create_new(&own)?.write_all(&image))
                .and_then(|()| std::fs::rename(&own, &path));
            if kept.is_err() {
                // It works without the folder; `doctor` reports it.
                std::fs::remove_file(&own).ok();
            }
        }
        Ok(image)
    }
}

/// Whether it is a whole ELF file, as a cubin is, and not what a full disk has left. The driver is not told the length.
fn is_whole(image: &[u8]) -> bool {
    const HEADER: usize = 64;
    if image.len() <= HEADER || !image.starts_with(b"\x7fELF") {
        return false;
    }
    let number = |at: usize, bytes: usize| {
        image[at..at + bytes].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    // For segments and for sections: the table's offset, and how many entries of what size it has.
    [(0x20, 0x36), (0x28, 0x3a)].into_iter().all(|(table, sizes)| {
        let end = number(table, 8).saturating_add(number(sizes, 2) * number(sizes + 2, 2));
        end <= image.len() as u64
    })
}

/// Every program of one device.
pub(crate) struct Programs {
    device: Rc<Device>,
    folder: Option<PathBuf>,
    /// Dropped with it: no thread may compile after the end of the process, when the compiler's own memory is already
    /// gone.
    pool: RefCell<Pool<Image>>,
    programs: RefCell<HashMap<Key, Program>>,
    functions: RefCell<HashMap<(Key, &'static str), Function>>,
    /// Kernels that may use as much shared memory as a block can have.
    large: RefCell<HashSet<Function>>,
}

/// Machine code, or the compiler's own words.
type Image = Result<Vec<u8>, String>;

enum Program {
    Compiling(Job),
    Compiled(Vec<u8>),
    /// Kept because its functions are in use.
    Loaded(Module),
}

impl Programs {
    /// A device without a compiler cannot be used.
    pub(crate) fn new(device: &Rc<Device>, folder: Option<PathBuf>) -> Result<Programs, Error> {
        if let Err(reason) = (device.compiler().version)() {
            return Err(Error::DeviceUnavailable { device: device.name().to_owned(), reason });
        }
        Ok(Programs {
            device: Rc::clone(device),
            folder,
            pool: RefCell::new(Pool::new(std::thread::available_parallelism().map_or(1, usize::from))),
            programs: RefCell::default(),
            functions: RefCell::default(),
            large: RefCell::default(),
        })
    }

    /// Begins to compile a program that will be needed.
    pub(crate) fn prepare(&self, key: Key) {
        self.programs.borrow_mut().entry(key.clone()).or_insert_with(|| {
            let (chip, compiler) = (self.device.chip.clone(), self.device.compiler());
            let (folder, cost) = (self.folder.clone(), key.cost_ms());
            let image = move || key.image(&chip, folder.as_deref(), compiler);
            Program::Compiling(self.pool.borrow_mut().give(cost, image))
        });
    }

    /// Whether it was compiled ahead.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.programs.borrow().contains_key(key)
    }

    /// Waits until everything that was begun is compiled, and reports the progress. Programs are loaded when they are
    /// used.
    pub(crate) fn ready(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<(), Error> {
        let mut programs = self.programs.borrow_mut();
        let compiling = |program: &Program| matches!(program, Program::Compiling(_));
        let (total, pool) = (programs.len(), self.pool.borrow());
        let begun = programs.values().filter(|program| compiling(program)).count();
        let mut done = pool.done();
        // Programs that are there already are not reported.
        while done < begun {
            progress(total - begun + done, total);
            done = pool.done_beyond(done);
        }
        let keys = programs.iter().filter(|(_, program)| compiling(program)).map(|(key, _)| key.clone());
        for key in keys.collect::<Vec<Key>>() {
            if let Some(Program::Compiling(job)) = programs.remove(&key) {
                let image = self.compiled(&key, &pool, job)?;
                programs.insert(key, Program::Compiled(image));
            }
        }
        Ok(())
    }

    fn compiled(&self, key: &Key, pool: &Pool<Image>, job: Job) -> Result<Vec<u8>, Error> {
        let image =
            pool.take(job).ok_or_else(|| self.failed(format!("the compiler broke on {}", key.unit)))?;
        image.map_err(|reason| self.failed(reason))
    }

    /// How many there are, and how many of them are being compiled.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (usize, usize) {
        let programs = self.programs.borrow();
        let compiling = programs.values().filter(|program| matches!(program, Program::Compiling(_)));
        (programs.len(), compiling.count())
    }

    /// All of them.
    #[cfg(test)]
    pub(crate) fn keys(&self) -> Vec<Key> {
        self.programs.borrow().keys().cloned().collect()
    }

    fn failed(&self, reason: String) -> Error {
        Error::Device { backend: self.device.name(), operation: "compile kernels", reason }
    }

    /// A kernel, compiled and loaded if it was not.
    pub(crate) fn function(&self, key: &Key, name: &'static str) -> Result<Function, Error> {
        if let Some(&function) = self.functions.borrow().get(&(key.clone(), name)) {
            return Ok(function);
        }
        self.prepare(key.clone());
        let mut programs = self.programs.borrow_mut();
        let module = match programs.remove(key) {
            Some(Program::Loaded(module)) => module,
            Some(Program::Compiled(image)) => Module::load(&self.device, &image)?,
            Some(Program::Compiling(job)) => {
                Module::load(&self.device, &self.compiled(key, &self.pool.borrow(), job)?)?
            }
            None => return Err(self.failed(format!("{} was not prepared", key.unit))),
        };
        // Kept in any case: other functions of it may be in use.
        programs.insert(key.clone(), Program::Loaded(module));
        let Some(Program::Loaded(module)) = programs.get(key) else { unreachable!("just put there") };
        let function = module.function(name)?;
        let able = self.device.abilities();
        // Where kernels may start before those in front of them have ended.
        if able.early_start {
            function.prefer_shared(&self.device)?;
        }
        if name == "attention" && able.clusters_max > CLUSTER_USUAL {
            function.allow_clusters(&self.device)?;
        }
        self.functions.borrow_mut().insert((key.clone(), name), function);
        Ok(function)
    }

    /// Allows a kernel this much dynamic shared memory. The driver has to be asked once for more than 48 KB, static
    /// memory included.
    pub(crate) fn allow_shared(&self, function: Function, bytes: u32) -> Result<(), Error> {
        if bytes > 0 && !self.large.borrow().contains(&function) {
            function.allow_shared(&self.device)?;
            self.large.borrow_mut().insert(function);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use fornax_compute::{Attention, Heads, KvDType, KvLayer, LatentHeads};
    use fornax_format::DType;

    use super::*;
    use crate::driver::{NVRTC, chip_of_capability as chip};
    use crate::ops::shapes::{HOPPER, part};
    use crate::ops::{
        HeadGroup, RowCounts, attention_program, every_gemm, expert_programs, few_programs,
        form_floats8_program, form_program, head_programs, latent_programs, program_one, programs_several,
        sample_program, storage, wgmma_program,
    };

    /// Of the rarer ones, which differ in their table alone, one with minima and one without.
    const FORMATS: [Format; 16] = [
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q8_0,
        Format::Q4_K,
        Format::Q5_K,
        Format::Q6_K,
        Format::MXFP8,
        Format::FP8_128,
        Format::FP8_A8,
        Format::Coded(DType::Q2_K),
        Format::Coded(DType::IQ2_XS),
    ];

    /// Programs without one twice.
    #[derive(Default)]
    struct Keys(Vec<Key>);

    impl Keys {
        fn add(&mut self, keys: impl IntoIterator<Item = Key>) {
            for key in keys {
                if !self.0.contains(&key) {
                    self.0.push(key);
                }
            }
        }
    }

    fn every_program() -> Vec<Key> {
        let plain = [
            "experts.cu",
            "glu.cu",
            "low_rank.cu",
            "norm.cu",
            "rate.cu",
            "recurrence.cu",
            "ring.cu",
            "rows.cu",
        ];
        let mut keys = Keys::default();
        keys.add(plain.map(Key::plain));
        keys.add([false, true].map(sample_program));
        for columns in [3584, 515] {
            keys.add([false, true].map(|experts| form_program(columns, experts)));
        }
        for format in FORMATS {
            keys.add([Key::quant("embed.cu", format), crate::upload::packer(format)]);
            if !format.takes_floats8() {
                add_experts(format, &mut keys);
            }
            add_products(format, &mut keys);
            for columns in [128, 512] {
                keys.add(head_programs(&part(format, (512, columns)), 96 << 10));
            }
        }
        add_attention(&mut keys);
        add_latent(&mut keys);
        keys.0
    }

    fn add_experts(format: Format, keys: &mut Keys) {
        // Few columns, and so many that they are cut into slices.
        for columns in [2048, 14_336] {
            let every = expert_programs(&part(format, (1536, columns)), 128, 4096, &HOPPER);
            // Those with gates and with the most rows have the most registers.
            let some = |at: usize| format == Format::Q4_K || columns == 2048 && [1, 4, 6].contains(&at);
            let count = every.len();
            keys.add(
                every.into_iter().enumerate().filter(|(at, _)| some(*at) || count == 1).map(|(_, key)| key),
            );
        }
    }

    fn add_products(format: Format, keys: &mut Keys) {
        if format == Format::F32 {
            return keys.add([Key::plain("gemv_f32.cu")]);
        }
        for rows in [3584, 37_888] {
            let part = part(format, (rows, 3584));
            // The widest have the most registers, with two warpgroups and with three.
            for limit in [192, 256] {
                let mut every = every_gemm(&part, limit, &HOPPER);
                let all = format == Format::Q4_K && limit == 192;
                let some = if all { 0 } else { every.len() - 1 };
                keys.add(every.drain(some..));
            }
            let rows = RowCounts { often: 128, most: 128 };
            for gates in [false, true] {
                keys.add(few_programs(&part, gates, rows, &HOPPER).pop());
            }
        }
        if format.takes_floats8() {
            return keys.add([form_floats8_program()]);
        }
        // A weight of many rows and one of few: their products differ in how far ahead they read.
        for rows in [3584, 151_936] {
            let (part, room) = (part(format, (rows, 3584)), 96 << 10);
            keys.add([false, true].into_iter().filter_map(|gates| program_one(&part, gates, room)));
            keys.add(programs_several(&part, 64, room));
        }
    }

    fn add_attention(keys: &mut Keys) {
        let heads = Heads { query: 1, kv: 1, dim: 1 };
        let heads_of = |(dim, group)| HeadGroup { dim, group };
        let causal = || Attention::causal(heads, KvLayer { group: 0, layer: 0 }, 1.0);
        let mut attention: Vec<Key> = Vec::new();
        for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::F8] {
            keys.add([Key { unit: "rope.cu", defines: storage(dtype) }]);
            for heads in [(64, 3), (128, 7), (20, 2)].map(heads_of) {
                attention.push(attention_program(heads, dtype, &causal()));
                keys.add(wgmma_program(heads, dtype, &causal(), true).map(|(key, _)| key));
            }
            for other in [
                Attention { soft_cap: Some(50.0), ..causal() },
                Attention { sinks: Some(()), ..causal() },
                Attention { causal: false, ..causal() },
                Attention { chunk: Some(8192), ..causal() },
            ] {
                attention.push(attention_program(heads_of((64, 2)), dtype, &other));
                keys.add(wgmma_program(heads_of((128, 2)), dtype, &other, false).map(|(key, _)| key));
            }
        }
        // Wide heads, as many of one as there may be, and one for each; queries that are rotated before.
        let wide = [(256, 2), (256, 8), (128, 16), (128, 1)].map(heads_of);
        attention.extend(wide.map(|heads| attention_program(heads, KvDType::F16, &causal())));
        keys.add(wgmma_program(heads_of((128, 1)), KvDType::F16, &causal(), false).map(|(key, _)| key));
        let singles = attention.iter().filter(|key| key.unit == "attention.cu").cloned();
        keys.add(singles.map(|key| Key { unit: "attention_rows.cu", ..key }));
        keys.add(attention);
    }

    fn add_latent(keys: &mut Keys) {
        // The largest models', and widths that fill neither a vector nor a step.
        for (query, latent, turned) in [(128, 512, 64), (3, 33, 8)] {
            let heads = LatentHeads { query, latent, turned };
            for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::F8] {
                keys.add(latent_programs(heads, dtype, &HOPPER));
                let able = Abilities { wgmma: false, shared_max: 96 << 10, ..HOPPER };
                keys.add(latent_programs(heads, dtype, &able));
            }
        }
    }

    /// The chips that people have: A100, RTX 30, RTX 40, H100 and H200, RTX 50.
    #[test]
    fn every_kernel_compiles_for_every_chip() {
        if let Err(reason) = (NVRTC.version)() {
            println!("SKIP program::tests::every_kernel_compiles_for_every_chip: {reason}");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let programs = every_program();
        // Kernels of wgmma are asked for where it is.
        let wgmma = |key: &Key| key.unit.starts_with("gemm") || key.unit.ends_with("_wgmma.cu");
        let on = |key: &Key, chip: &Chip| !wgmma(key) || chip.abilities.wgmma;
        let chips = [90, 80, 86, 89, 120].map(chip);
        let wanted: Vec<(&Key, &Chip)> = chips
            .iter()
            .flat_map(|chip| programs.iter().filter(move |key| on(key, chip)).map(move |key| (key, chip)))
            .collect();
        // Whoever is free takes the next: the chips have not equally many.
        let next = Mutex::new(wanted.iter());
        let taken = || next.lock().unwrap().next();
        // Of this thread, for who looks where a cold start's time goes (`--nocapture`).
        let processor_seconds = || {
            let spent = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
            spent.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0.0) * 1e-9
        };
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().unwrap().get() {
                scope.spawn(|| {
                    while let Some((key, chip)) = taken() {
                        let before = processor_seconds();
                        let image = key.image(chip, Some(folder.path()), NVRTC);
                        assert!(image.as_deref().is_ok_and(is_whole), "{key:?} for {chip:?}: {image:?}");
                        let seconds: f64 = processor_seconds() - before;
                        println!("{seconds:.3} s {} {} {}", chip.target, key.unit, key.defines.join(" "));
                    }
                });
            }
        });
        // What was compiled is found again: nothing new is written.
        let files = || std::fs::read_dir(folder.path()).unwrap().count();
        let before = files();
        assert_eq!(before, wanted.len());
        programs[0].image(&chip(80), Some(folder.path()), NVRTC).unwrap();
        assert_eq!(files(), before);
    }

    #[test]
    fn a_structure_that_differs_from_rusts_does_not_compile() {
        if let Err(reason) = (NVRTC.version)() {
            println!("SKIP program::tests::a_structure_that_differs_from_rusts_does_not_compile: {reason}");
            return;
        }
        let key = Key::plain("low_rank.cu");
        // What stands in a file, and what a change of it alone makes of it; and the complaint.
        let compile = |file: &str, from: &str, to: &str| {
            let changed = |&(name, ref text): &(&'static str, String)| {
                assert!(name != file || text.contains(from), "{file} has no {from}");
                (name, if name == file { text.replacen(from, to, 1) } else { text.clone() })
            };
            let headers: Vec<_> = CHECKED.headers.iter().map(changed).collect();
            let (name, text) = CHECKED.units.iter().map(changed).find(|(name, _)| *name == key.unit).unwrap();
            (NVRTC.compile)(&Source { name, text: &text, headers: &headers }, &key.options(&chip(80)))
        };
        compile("low_rank.cu", "int place;", "int place;").unwrap();
        for (file, from, to, what) in [
            ("prelude.cuh", "const int* wanted;", "const int* wanted; int more;", "Step::firsts"),
            ("prelude.cuh", "int rows, columns, groups;", "int columns, rows, groups;", "Part::rows"),
            ("prelude.cuh", "int stride;", "long stride;", "Step::stride"),
            ("low_rank.cu", "int first, pad;", "int first, pad; float* more;", "Changes"),
            ("low_rank.cu", "#define CHANGES_MAX 32", "#define CHANGES_MAX 16", "CHANGES_MAX"),
        ] {
            let refused = compile(file, from, to).expect_err(what);
            let complaint = format!("{what} of {file} is not what Rust takes it for");
            assert!(refused.contains(&complaint), "{complaint}: {refused}");
        }
    }

    #[test]
    fn whatever_decides_over_machine_code_is_in_its_name() {
        let names: std::collections::HashSet<String> = [
            Key::plain("glu.cu").digest(&chip(80), (13, 0)),
            Key::plain("glu.cu").digest(&chip(90), (13, 0)),
            Key::plain("glu.cu").digest(&chip(80), (12, 9)),
            Key::plain("rows.cu").digest(&chip(80), (13, 0)),
            Key::quant("glu.cu", Format::F16).digest(&chip(80), (13, 0)),
        ]
        .into();
        assert_eq!(names.len(), 5);
        assert_eq!(
            Key::plain("glu.cu").digest(&chip(80), (13, 0)),
            Key::plain("glu.cu").digest(&chip(80), (13, 0))
        );
    }

    #[test]
    fn every_header_is_known_by_the_name_that_files_include_it_by() {
        for (name, text) in HEADERS.iter().chain(UNITS) {
            for line in text.lines().filter_map(|line| line.strip_prefix("#include \"")) {
                let included = line.trim_end_matches('"');
                assert!(HEADERS.iter().any(|(header, _)| *header == included), "{name} includes {included}");
            }
        }
        assert!(FORMATS.iter().all(|format| HEADERS.iter().any(|(name, _)| *name == format.header())));
    }

    #[test]
    fn half_a_file_is_not_taken_for_machine_code() {
        assert!(!is_whole(b""));
        assert!(!is_whole(&[0; 4096]));
        assert!(!is_whole(b"\x7fELF"));
        // Its table of three sections, 64 bytes each, ends at 4096.
        let mut image = b"\x7fELF".to_vec();
        image.resize(4096, 7);
        image[0x20..0x28].fill(0);
        image[0x28..0x30].copy_from_slice(&(4096u64 - 3 * 64).to_le_bytes());
        image[0x36..0x40].copy_from_slice(&[56u16, 0, 64, 3, 1].map(u16::to_le_bytes).concat());
        assert!(is_whole(&image));
        assert!(!is_whole(&image[..4095]));
    }

    #[test]
    fn two_who_write_a_kernel_at_once_leave_nothing_half_done_to_a_reader() {
        fn large(_: &Source<'_>, _: &[String]) -> Result<Vec<u8>, String> {
            let mut image = b"\x7fELF".to_vec();
            image.resize(8 << 20, 0);
            Ok(image)
        }
        let compiler = Compiler { version: || Ok((13, 0)), compile: large };
        for _ in 0..10 {
            let folder = tempfile::tempdir().unwrap();
            let write = || Key::plain("glu.cu").image(&chip(90), Some(folder.path()), compiler).unwrap();
            std::thread::scope(|scope| {
                let writers = [scope.spawn(write), scope.spawn(write)];
                while writers.iter().any(|writer| !writer.is_finished()) {
                    let kernels = std::fs::read_dir(folder.path()).unwrap().flatten();
                    for kernel in kernels.filter(|file| file.path().extension() == Some("cubin".as_ref())) {
                        assert_eq!(std::fs::read(kernel.path()).unwrap().len(), 8 << 20);
                    }
                }
            });
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        }
    }
}
