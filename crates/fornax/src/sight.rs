//! What looks at pictures for a model: a tower on a thread and with threads of its own, so that nobody's next token waits
//! for a picture. It gives way to the model where both want a core.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use fornax_chat::{Frame, Image, Placeholder, Seen, Sight, Unseen};
use fornax_compute::cpu::{Cpu, CpuOptions, CpuSizes};
use fornax_compute::{Counting, Memory as _};
use fornax_engine::ContentHash;
use fornax_format::Checkpoint;
use fornax_image::{Fit, Patches, Picture, Processor};
use fornax_model::{Config, LookAhead, PatchGrid, Tower, TowerConfig};
use fornax_text::{Special, Tokenizer};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::Error;

/// Tokens that a picture becomes at most where nobody says: of Qwen3-VL a picture of a megapixel. Its activations take some
/// 300 MB on the way.
pub(crate) const IMAGE_TOKENS: usize = 1024;

/// Bytes of rows that are kept for pictures that come again, as they do with every turn of a conversation.
const KEPT_BYTES: usize = 256 << 20;

/// How often somebody who waits for a picture is asked whether it is still wanted.
const LOOK_UP: Duration = Duration::from_millis(50);

/// What a family does beside its tower.
struct Family {
    /// By which its tower is known.
    projector: &'static str,
    /// Which size pictures are brought to, where the files do not say it otherwise.
    fit: fn(&TowerConfig) -> Fit,
    /// The token of the prompt where a picture is read.
    placeholder: &'static str,
    /// What stands for the tokens of a picture that is read behind the placeholder; `None` where it is read in its
    /// place.
    fill: Option<&'static str>,
    /// What the processor writes around it.
    frame: Option<Frame>,
    /// Whether its tokens have places down and across.
    sections: bool,
}

const FAMILIES: [Family; 3] = [
    Family {
        projector: "qwen3vl_merger",
        fit: |_| Fit::Between { pixels_min: 256 * 256, pixels_max: 4096 * 4096 },
        placeholder: "<|image_pad|>",
        fill: None,
        frame: None,
        sections: true,
    },
    Family {
        projector: "gemma3",
        fit: |tower| Fit::Square { side: small(tower.positions * tower.patch) },
        placeholder: "<start_of_image>",
        fill: Some("<image_soft_token>"),
        frame: Some(Frame { written: "<start_of_image>", by: "\n\n<start_of_image><end_of_image>\n\n" }),
        sections: false,
    },
    Family {
        projector: "gemma4v",
        fit: |_| Fit::Filling { tokens: 280 },
        placeholder: "<|image|>",
        fill: None,
        frame: Some(Frame { written: "<|image|>", by: "<|image><|image|><image|>" }),
        sections: false,
    },
];

/// What a model's files say of the pictures that it reads.
#[derive(Clone)]
pub(crate) struct Reading {
    pub(crate) tower: TowerConfig,
    family: &'static Family,
    processor: Processor,
    placeholder: Option<u32>,
    /// Whether the model reads a picture in both directions.
    whole: bool,
    options: CpuOptions,
}

impl Reading {
    /// All that what becomes of a picture depends on.
    pub(crate) fn told(&self) -> String {
        format!("{:?} {:?}", self.tower, self.processor)
    }

    /// `None` where the files have nothing that reads pictures.
    pub(crate) fn of(
        checkpoint: &Checkpoint,
        config: &Config,
        tokens_max: usize,
        threads: usize,
    ) -> Result<Option<Reading>, Error> {
        let Some(tower) = TowerConfig::read(checkpoint, config)? else { return Ok(None) };
        let family = FAMILIES.iter().find(|family| family.projector == tower.projector());
        let family = family.expect("every tower has its family");
        let processor = processor(checkpoint, &tower, family)?.within(tokens_max);
        let placeholder = match checkpoint {
            Checkpoint::HuggingFace(model) if family.fill.is_none() => {
                model.config()["image_token_id"].as_u64()
            }
            _ => None,
        };
        let options = CpuOptions {
            threads,
            tokens_max: processor.patches_max().next_multiple_of(tower.merge * tower.merge),
            slots: 1,
            depth: 1,
            ..CpuOptions::default()
        };
        let placeholder = placeholder.and_then(|token| u32::try_from(token).ok());
        let whole = config.looks_ahead != LookAhead::Never;
        Ok(Some(Reading { tower, family, processor, placeholder, whole, options }))
    }

    /// Tokens of a picture that one step has to compute together; none where pictures can be cut.
    pub(crate) fn whole_tokens(&self) -> usize {
        let square = self.tower.merge * self.tower.merge;
        if self.whole { self.processor.patches_max() / square } else { 0 }
    }

    /// Bytes that the tower takes, and the pictures that are kept.
    pub(crate) fn bytes(&self, checkpoint: &Checkpoint) -> Result<u64, Error> {
        let counting = Counting::new(CpuSizes::new(&self.options));
        drop(Tower::load(checkpoint, &self.tower, &counting, self.options.tokens_max, &mut |_| {})?);
        Ok(counting.usage().total().saturating_add(KEPT_BYTES as u64))
    }

    /// What a prompt has for a picture.
    fn placeholder(&self, tokenizer: &Tokenizer) -> Result<Placeholder, Error> {
        let Family { placeholder: name, fill, .. } = *self.family;
        let known = |name: &str| match tokenizer.encode(name, Special::Parse)?[..] {
            [token] => Ok(Some(token)),
            _ => Ok::<_, Error>(None),
        };
        let token = match self.placeholder {
            Some(token) => token,
            None => known(name)?.ok_or(Error::NoPlaceholder { name })?,
        };
        match fill {
            // Files in GGUF have no row for what is never read.
            Some(fill) => Ok(Placeholder { token, stays: true, fill: known(fill)?.unwrap_or(token) }),
            None => Ok(Placeholder::of(token)),
        }
    }
}

/// What is made of pictures before the tower reads them.
fn processor(checkpoint: &Checkpoint, tower: &TowerConfig, family: &Family) -> Result<Processor, Error> {
    let said = match checkpoint {
        Checkpoint::HuggingFace(model) => model.preprocessor_config().cloned(),
        Checkpoint::Gguf(gguf) => {
            let beside =
                gguf.beside().iter().find(|file| file.metadata().get("clip.vision.image_mean").is_some());
            let colours = |key: &str| {
                let said = beside.and_then(|file| file.metadata().opt_f32s(key).ok().flatten());
                said.map_or(Value::Null, |said| json!(said))
            };
            let (mean, std) = (colours("clip.vision.image_mean"), colours("clip.vision.image_std"));
            Some(json!({"image_mean": mean, "image_std": std}))
        }
    };
    let mut said = said.unwrap_or_else(|| json!({}));
    let wrong = |name: &str, value: String, wanted| {
        Err(fornax_image::Error::Processor { name: name.to_owned(), value, wanted }.into())
    };
    if !said.is_object() {
        return wrong("preprocessor_config.json", "no object".to_owned(), "an object");
    }
    // Where the files do not say it, as the family's own do.
    for (name, others, value) in [
        ("patch_size", None, json!(tower.patch)),
        ("merge_size", Some("pooling_kernel_size"), json!(tower.merge)),
        ("image_mean", None, json!([0.5, 0.5, 0.5])),
        ("image_std", None, json!([0.5, 0.5, 0.5])),
    ] {
        if said[name].is_null() && others.is_none_or(|other| said[other].is_null()) {
            said[name] = value;
        }
    }
    let processor = Processor::from_json(&said, (family.fit)(tower))?;
    let what = "what the model's tower takes";
    for (name, got, wanted) in [
        ("patch_size", processor.patch as usize, tower.patch),
        ("merge_size", processor.merge as usize, tower.merge),
    ] {
        if got != wanted {
            return wrong(name, got.to_string(), what);
        }
    }
    match (processor.fit, tower.square()) {
        (Fit::Square { side }, Some(square)) if side as usize != square * tower.patch => {
            wrong("size", side.to_string(), what)
        }
        _ => Ok(processor),
    }
}

fn small(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// The way to a tower.
pub(crate) struct Eyes {
    processor: Processor,
    placeholder: Placeholder,
    frame: Option<Frame>,
    row_bytes: usize,
    kept: Arc<Mutex<Kept>>,
    /// `None` only while it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// A picture on its way to the tower.
struct Job {
    hash: ContentHash,
    owner: Option<Arc<str>>,
    patches: Patches,
    /// Nobody waits for it any more.
    left: Arc<AtomicBool>,
    reply: Sender<Result<Seen, Unseen>>,
}

impl Eyes {
    /// Loads the tower on the thread that will compute with it.
    pub(crate) fn open(
        checkpoint: &Arc<Checkpoint>,
        reading: &Reading,
        tokenizer: &Tokenizer,
    ) -> Result<Eyes, Error> {
        let placeholder = reading.placeholder(tokenizer)?;
        let kept = Arc::new(Mutex::new(Kept::default()));
        let (jobs, asked) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let (checkpoint, reading_there) = (Arc::clone(checkpoint), reading.clone());
        let kept_there = Arc::clone(&kept);
        let run = move || {
            give_way();
            let loaded = Cpu::new(reading_there.options.clone()).map_err(Error::from).and_then(|cpu| {
                let (tower, most) = (&reading_there.tower, reading_there.options.tokens_max);
                Ok((Tower::load(&checkpoint, tower, &cpu, most, &mut |_| {})?, cpu))
            });
            drop(checkpoint);
            match loaded {
                Ok((tower, cpu)) => {
                    drop(tell.send(Ok(())));
                    look_at_all(&cpu, tower, &reading_there, &asked, &kept_there);
                }
                Err(error) => drop(tell.send(Err(error))),
            }
        };
        let thread = std::thread::Builder::new().name("tower".to_owned()).spawn(run);
        let thread = thread.map_err(|error| Error::Thread { what: "images", error })?;
        match told.recv() {
            Ok(loaded) => loaded?,
            Err(_) => {
                let panic = thread.join().err();
                std::panic::resume_unwind(panic.unwrap_or_else(|| Box::new("the tower's thread ended")));
            }
        }
        Ok(Eyes {
            processor: reading.processor.clone(),
            placeholder,
            frame: reading.family.frame,
            row_bytes: reading.tower.columns() * size_of::<f32>(),
            kept,
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }
}

/// A picture's file, for a message that shows it. It is not decoded yet.
pub fn image(path: impl AsRef<Path>) -> Result<Image, Error> {
    let path = path.as_ref();
    let failed = |error| Error::Image { path: path.to_owned(), error };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > fornax_image::BYTES_MAX as u64 {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        return Err(fornax_image::Error::TooManyBytes { bytes }.into());
    }
    Ok(Image { bytes: std::fs::read(path).map_err(failed)?.into() })
}

impl Sight for Eyes {
    fn placeholder(&self) -> Placeholder {
        self.placeholder
    }

    fn frame(&self) -> Option<Frame> {
        self.frame
    }

    fn tokens(&self, image: &Image) -> Result<usize, Unseen> {
        let size = Picture::size_of(&image.bytes).map_err(wrong)?;
        Ok(self.processor.grid(size).map_err(wrong)?.tokens())
    }

    fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    fn look(&self, image: &Image, owner: Option<&str>, go_on: &dyn Fn() -> bool) -> Result<Seen, Unseen> {
        let hash = hash(image);
        if let Some(seen) = kept(&self.kept).find(owner, hash) {
            return Ok(seen);
        }
        let picture = Picture::decode(&image.bytes).map_err(wrong)?;
        if !go_on() {
            return Err(Unseen::GivenUp);
        }
        let patches = self.processor.patches(&picture).map_err(wrong)?;
        drop(picture);
        let ended = || Unseen::Failed("the thread that computes images has ended".to_owned());
        let left = Arc::new(AtomicBool::new(false));
        let (reply, answer) = mpsc::channel();
        let owner = owner.map(Arc::from);
        let job = Job { hash, owner, patches, left: Arc::clone(&left), reply };
        self.jobs.as_ref().and_then(|jobs| jobs.send(job).ok()).ok_or_else(ended)?;
        loop {
            match answer.recv_timeout(LOOK_UP) {
                Ok(seen) => return seen,
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                Err(RecvTimeoutError::Timeout) if go_on() => {}
                Err(RecvTimeoutError::Timeout) => {
                    left.store(true, Ordering::Relaxed);
                    return Err(Unseen::GivenUp);
                }
            }
        }
    }
}

impl Drop for Eyes {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A tower that panicked has failed its callers already.
            drop(thread.join());
        }
    }
}

/// Looks at pictures one after the other, until nobody can ask any more.
fn look_at_all(
    cpu: &Cpu,
    mut tower: Tower<Cpu>,
    reading: &Reading,
    asked: &Receiver<Job>,
    all: &Mutex<Kept>,
) {
    while let Ok(Job { hash, owner, patches, left, reply }) = asked.recv() {
        if left.load(Ordering::Relaxed) {
            continue;
        }
        // It may have been asked for twice.
        if let Some(seen) = kept(all).find(owner.as_deref(), hash) {
            drop(reply.send(Ok(seen)));
            continue;
        }
        let places: Vec<(u32, u32)> = patches.grid.places().collect();
        let (width, height) = (patches.grid.width, patches.grid.height);
        let grid = PatchGrid { width, height, places: &places, values: &patches.values };
        let seen = match tower.see(cpu, grid, &|| !left.load(Ordering::Relaxed)) {
            Ok(Some(rows)) => {
                let columns = tower.config().columns();
                let offsets = if reading.family.sections { patches.grid.offsets() } else { Vec::new() };
                let seen = Seen { hash, columns, rows: rows.into(), offsets, whole: reading.whole };
                kept(all).keep(owner, &seen);
                Ok(seen)
            }
            Ok(None) => Err(Unseen::GivenUp),
            Err(error) => Err(Unseen::Failed(error.to_string())),
        };
        drop(reply.send(seen));
    }
}

/// Lets the model's threads go first where both want a core. The threads that the tower computes with are made by this
/// one, and are what it is.
fn give_way() {
    #[cfg(target_os = "linux")]
    const NICE: i32 = 10;
    // On Linux that is this thread's alone; elsewhere it would be the whole program's.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(NICE);
}

fn wrong(error: fornax_image::Error) -> Unseen {
    Unseen::Wrong(error.to_string())
}

/// What a picture is, by the bytes of its file: what is made of them is always the same.
fn hash(image: &Image) -> ContentHash {
    let digest = Sha256::digest(&image.bytes);
    let mut hash = [0; 16];
    hash.copy_from_slice(&digest[..16]);
    ContentHash(hash)
}

fn kept(all: &Mutex<Kept>) -> std::sync::MutexGuard<'_, Kept> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pictures that were seen, the last one used at the end. There are some thousands at most.
#[derive(Default)]
struct Kept {
    seen: Vec<Own>,
    bytes: usize,
}

/// A picture, and for whom it was seen: how soon an answer begins must not tell others that it was sent.
struct Own {
    owner: Option<Arc<str>>,
    seen: Seen,
}

impl Kept {
    fn find(&mut self, owner: Option<&str>, hash: ContentHash) -> Option<Seen> {
        let own = |own: &Own| own.seen.hash == hash && own.owner.as_deref() == owner;
        let at = self.seen.iter().position(own)?;
        self.seen[at..].rotate_left(1);
        self.seen.last().map(|own| own.seen.clone())
    }

    fn keep(&mut self, owner: Option<Arc<str>>, seen: &Seen) {
        let bytes = |seen: &Seen| size_of_val(&*seen.rows);
        if bytes(seen) > KEPT_BYTES {
            return;
        }
        self.bytes += bytes(seen);
        self.seen.push(Own { owner, seen: seen.clone() });
        while self.bytes > KEPT_BYTES {
            self.bytes -= bytes(&self.seen.remove(0).seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use fornax_compute::Sampling;
    use fornax_compute::cpu::Activations;
    use serde::Deserialize;

    use super::*;
    use crate::{Completion, Content, Fornax, KvDType, Message, OpenOptions, Request, Role};

    fn folder(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/images").join(name)
    }

    fn picture(name: &str) -> Image {
        image(Path::new(env!("CARGO_MANIFEST_DIR")).join("../image/tests/fixtures").join(name)).unwrap()
    }

    /// In full precision, as transformers has computed it.
    fn options(path: PathBuf) -> OpenOptions {
        OpenOptions::new(path).activations(Activations::Float).kv_dtype(KvDType::F32).threads(2).context(512)
    }

    /// A conversation, its prompt and what follows it, by transformers.
    #[derive(Deserialize)]
    struct Golden {
        prompt: Vec<u32>,
        grids: Vec<[usize; 2]>,
        chat_messages: Vec<Turn>,
        chat_images: Vec<String>,
        chat_prompt: Vec<u32>,
        chat_following: Vec<u32>,
    }

    #[derive(Deserialize)]
    struct Turn {
        role: String,
        content: Vec<Part>,
    }

    #[derive(Deserialize)]
    struct Part {
        text: Option<String>,
    }

    fn golden(case: &str) -> Golden {
        serde_json::from_slice(&std::fs::read(folder(case).join("golden.json")).unwrap()).unwrap()
    }

    fn messages(golden: &Golden, images: &[Image]) -> Vec<Message> {
        let mut images = images.iter().cloned();
        let mut part = |part: &Part| match &part.text {
            Some(text) => Content::Text(text.clone()),
            None => Content::Image(images.next().unwrap()),
        };
        let message = |turn: &Turn| {
            let role = if turn.role == "user" { Role::User } else { Role::Assistant };
            Message::of(role, turn.content.iter().map(&mut part).collect())
        };
        golden.chat_messages.iter().map(message).collect()
    }

    fn asked(messages: Vec<Message>, tokens: usize) -> Request {
        Request {
            max_tokens: Some(tokens),
            ignore_eos: true,
            sampling: Sampling { top_logprobs: Some(3), ..Sampling::greedy() },
            ..Request::chat(messages)
        }
    }

    /// Tokens with the bits of their log-probabilities.
    fn bits(completion: &Completion) -> Vec<(u32, u32)> {
        let opinions = completion.logprobs.iter().map(|opinion| opinion.logprob.unwrap().to_bits());
        completion.tokens.iter().copied().zip(opinions).collect()
    }

    #[test]
    fn a_conversation_with_pictures_is_answered_as_by_transformers() {
        for case in ["qwen3-vl", "qwen35", "gemma3", "gemma4", "gemma4-e"] {
            let golden = golden(case);
            let images: Vec<Image> = golden.chat_images.iter().map(|name| picture(name)).collect();
            let numbers = std::fs::read(folder(case).join("golden.bin")).unwrap();
            let square = if case.starts_with("gemma4") { 9 } else { 4 };
            let rows: usize = golden.grids.iter().map(|[height, width]| height * width / square).sum();
            let (columns, vocab) = if case == "qwen3-vl" { (48 * 3, 272) } else { (48, 272) };
            let scores = 4 * (rows * columns + golden.prompt.len() * vocab);
            let score = |step: usize, token: u32| {
                let at = scores + 4 * (step * vocab + token as usize);
                f32::from_le_bytes(numbers[at..at + 4].try_into().unwrap())
            };
            let model = options(folder(case)).open().unwrap();
            let request = asked(messages(&golden, &images), golden.chat_following.len());
            assert_eq!(model.text().request_tokens(&request).unwrap(), golden.chat_prompt, "{case}");
            let answer = model.generate(&request).unwrap();
            assert_eq!(answer.tokens, golden.chat_following, "{case}");
            let mut most = 0.0f32;
            for (step, opinion) in answer.logprobs.iter().enumerate() {
                for (token, logprob) in &opinion.top {
                    most = most.max((logprob - score(step, *token)).abs());
                }
            }
            println!("{case}: log-probabilities at most {most:.1e} apart");
            // Two of the pictures are JPEG, whose decoders differ.
            assert!(most < 0.2, "{case}: {most}");
        }
    }

    #[test]
    fn a_model_in_gguf_reads_pictures_with_the_file_beside_it() {
        let golden = golden("qwen3-vl");
        let images: Vec<Image> = golden.chat_images.iter().map(|name| picture(name)).collect();
        let request = asked(messages(&golden, &images), 3);
        // Found by its name, or named.
        let found = options(folder("qwen3-vl.gguf")).image_tokens(40);
        for model in [found.clone(), found.projector(folder("mmproj-qwen3-vl.gguf"))] {
            let model = model.open().unwrap();
            let prompt = model.text().request_tokens(&request).unwrap();
            let shown = prompt.iter().filter(|token| **token == 261).count();
            assert!((90..=120).contains(&shown), "{shown} tokens of three pictures");
            assert_eq!(model.generate(&request).unwrap().tokens.len(), 3);
        }
    }

    #[test]
    fn what_is_found_in_the_cache_ends_where_a_picture_differs_and_changes_no_bit() {
        let golden = golden("qwen3-vl");
        let images: Vec<Image> = golden.chat_images.iter().map(|name| picture(name)).collect();
        let open = || options(folder("qwen3-vl")).parallel(2).open().unwrap();
        let model = open();
        let first = model.generate(&asked(messages(&golden, &images), 4)).unwrap();
        let again = model.generate(&asked(messages(&golden, &images), 4)).unwrap();
        assert_eq!((first.cached_tokens, again.cached_tokens), (0, golden.chat_prompt.len() / 32 * 32));
        assert_eq!(bits(&first), bits(&again));
        // The second of three is another file, although with the same pixels.
        let mut changed = images.clone();
        changed[1].bytes = [&images[1].bytes[..], &[0]].concat().into();
        let other = model.generate(&asked(messages(&golden, &changed), 4)).unwrap();
        let second = golden.chat_prompt.iter().enumerate().filter(|(_, token)| **token == 261);
        let second = second.map(|(at, _)| at).nth(model.text().sight().unwrap().tokens(&images[0]).unwrap());
        let second = second.unwrap();
        assert!(
            other.cached_tokens <= second && other.cached_tokens + 32 > second,
            "{}",
            other.cached_tokens
        );
        assert_eq!(bits(&other), bits(&first));
        // Another picture changes the answer.
        let swapped = [images[0].clone(), images[2].clone(), images[1].clone()];
        let swapped = model.generate(&asked(messages(&golden, &swapped), 4)).unwrap();
        assert_ne!(bits(&swapped), bits(&first));
        // Beside a request of text alone, both get what each gets alone.
        let text = asked(vec![Message::user("Slopes and edges, and no picture.")], 12);
        let alone = open().generate(&text).unwrap();
        let (together, seen) = std::thread::scope(|scope| {
            let beside = scope.spawn(|| model.generate(&text).unwrap());
            let seen = model.generate(&asked(messages(&golden, &images), 4)).unwrap();
            (beside.join().unwrap(), seen)
        });
        assert_eq!((bits(&together), bits(&seen)), (bits(&alone), bits(&first)));
    }

    #[test]
    fn pictures_that_cannot_be_read_are_refused_by_their_message() {
        let ask = |model: &Fornax, image: Image| {
            let content = vec![Content::Image(image), Content::Text("What?".to_owned())];
            model.generate(&asked(vec![Message::of(Role::User, content)], 1)).unwrap_err().to_string()
        };
        let model = options(folder("qwen3-vl")).open().unwrap();
        let wanted = "wanted JPEG, PNG, WebP or GIF";
        let bytes = |bytes: &[u8]| Image { bytes: bytes.into() };
        assert_eq!(
            ask(&model, bytes(b"<svg/>")),
            format!("message 0: the image is an SVG drawing; {wanted}")
        );
        assert!(ask(&model, picture("bomb.png")).starts_with("message 0: the image is 40000 x 40000 pixels"));
        let whole = picture("odd.png");
        assert!(
            ask(&model, bytes(&whole.bytes[..400])).starts_with("message 0: the image cannot be decoded")
        );
        let blind = options(folder("qwen3-vl")).images(false).open().unwrap();
        let off = "message 0: images are turned off for this model (--no-images)";
        assert_eq!(ask(&blind, picture("odd.png")), off);
        let apart = tempfile::tempdir().unwrap();
        let model = apart.path().join("qwen3-vl.gguf");
        std::fs::copy(folder("qwen3-vl.gguf"), &model).unwrap();
        let alone = options(model).open().unwrap();
        assert_eq!(ask(&alone, picture("odd.png")), "message 0: this model reads no images; it reads text");
        let missing = image("no-such.png").unwrap_err().to_string();
        assert!(missing.starts_with("image no-such.png: "), "{missing}");
        let twice = options(folder("qwen3-vl")).projector(folder("mmproj-qwen3-vl.gguf")).open();
        assert!(twice.err().unwrap().to_string().contains("goes with a model in GGUF"));
    }

    #[test]
    fn a_plan_counts_what_reads_pictures() {
        let with = options(folder("qwen3-vl")).plan().unwrap().plan;
        let without = options(folder("qwen3-vl")).images(false).plan().unwrap().plan;
        assert!(with.runtime_bytes() > without.runtime_bytes() + KEPT_BYTES as u64);
        assert_eq!(with.usage(), without.usage());
    }

    #[test]
    fn the_pictures_used_last_are_kept_within_the_bound() {
        let quarter = |name: u8| Seen {
            hash: ContentHash([name; 16]),
            columns: 1,
            rows: vec![0.0; KEPT_BYTES / 16].into(),
            offsets: Vec::new(),
            whole: false,
        };
        let mut kept = Kept::default();
        (0..4).for_each(|name| kept.keep(None, &quarter(name)));
        assert!(kept.find(None, ContentHash([0; 16])).is_some());
        kept.keep(None, &quarter(4));
        let there = |kept: &mut Kept, name| kept.find(None, ContentHash([name; 16])).is_some();
        assert!(!there(&mut kept, 1) && there(&mut kept, 0) && there(&mut kept, 2) && there(&mut kept, 4));
        assert!(kept.bytes <= KEPT_BYTES);
    }

    #[test]
    fn a_picture_that_was_kept_for_one_owner_is_found_by_no_other() {
        let seen = |rows: usize| Seen {
            hash: ContentHash([7; 16]),
            columns: 1,
            rows: vec![0.0; rows].into(),
            offsets: Vec::new(),
            whole: false,
        };
        let mut kept = Kept::default();
        kept.keep(Some("ann".into()), &seen(1));
        let mut found = |owner| kept.find(owner, ContentHash([7; 16])).map(|seen| seen.rows.len());
        assert_eq!((found(Some("ann")), found(Some("bob")), found(None)), (Some(1), None, None));
        kept.keep(Some("bob".into()), &seen(2));
        let mut found = |owner| kept.find(owner, ContentHash([7; 16])).map(|seen| seen.rows.len());
        assert_eq!((found(Some("ann")), found(Some("bob")), found(None)), (Some(1), Some(2), None));
    }
}
