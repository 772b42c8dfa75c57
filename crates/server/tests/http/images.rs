//! Pictures, as the clients of each API send them.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use fornax_chat::{Image, Placeholder, Seen, Sight, Unseen};
use fornax_engine::ContentHash;
use serde_json::{Value, json};

use crate::{
    client::{post, raw, request},
    world::{Setup, World},
};

/// Shows a picture as the byte 1.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}\
    {% else %}{% for part in message.content %}{% if part.type == 'image' %}\x01{% else %}{{ part.text }}{% endif %}\
    {% endfor %}{% endif %}<|im_end|>{% endfor %}<|im_start|>";

/// Makes of each byte of a picture a token.
#[derive(Default)]
struct Bytes {
    looked: AtomicUsize,
    /// What each token is said to take.
    row_bytes: usize,
    /// For whom.
    owners: Mutex<Vec<Option<String>>>,
}

impl Sight for Bytes {
    fn placeholder(&self) -> Placeholder {
        Placeholder::of(1)
    }

    fn tokens(&self, image: &Image) -> Result<usize, Unseen> {
        match &*image.bytes {
            b"wrong" => Err(Unseen::Wrong("the image is wrong".to_owned())),
            bytes => Ok(bytes.len()),
        }
    }

    fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    fn look(&self, image: &Image, owner: Option<&str>, go_on: &dyn Fn() -> bool) -> Result<Seen, Unseen> {
        self.looked.fetch_add(1, Ordering::Relaxed);
        self.owners.lock().unwrap().push(owner.map(str::to_owned));
        if &*image.bytes == b"fails" {
            return Err(Unseen::Failed("no reason".to_owned()));
        }
        assert!(go_on());
        let rows: Vec<f32> = image.bytes.iter().map(|&byte| f32::from(byte)).collect();
        let mut hash = ContentHash([0; 16]);
        hash.0[..image.bytes.len()].copy_from_slice(&image.bytes);
        Ok(Seen { hash, columns: 1, rows: rows.into(), offsets: Vec::new(), whole: false })
    }
}

async fn seeing() -> (World, Arc<Bytes>) {
    let sight = Arc::new(Bytes::default());
    let shared: Arc<dyn Sight> = Arc::clone(&sight) as _;
    (World::ready(Setup { template: TEMPLATE, sight: Some(shared), ..Setup::default() }).await, sight)
}

/// Three bytes, and two without their padding.
const CAT: &str = "Y2F0";
const OX: &str = "b3g";

fn chat(content: Value) -> Value {
    json!({"model": "script", "max_tokens": 3, "messages": [{"role": "user", "content": content}]})
}

fn url(data: &str) -> String {
    format!("data:image/png;base64,{data}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_api_shows_its_pictures_and_counts_their_tokens() {
    let (world, sight) = seeing().await;
    // Two markers and a byte, then each picture's tokens, and the marker of the answer.
    let tokens = 2 + 1 + 3 + 2 + 1;
    let check = async |path: &str, body: Value, at: &str| {
        let response = post(world.address, path, &body).await;
        assert_eq!(response.status, 200, "{path}: {}", response.body);
        assert_eq!(response.json().pointer(at), Some(&json!(tokens)), "{path}: {}", response.body);
    };
    let image = |data: &str| json!({"type": "image_url", "image_url": {"url": url(data), "detail": "low"}});
    let plain = |data: &str| json!({"type": "image_url", "image_url": url(data)});
    let text = json!({"type": "text", "text": "?"});
    let parts = json!([image(CAT), text, plain(OX)]);
    check("/v1/chat/completions", chat(parts), "/usage/prompt_tokens").await;
    let input = |data: &str| json!({"type": "input_image", "image_url": url(data)});
    let content = json!([input(CAT), {"type": "input_text", "text": "?"}, input(OX)]);
    let body = json!({"model": "script", "input": [{"role": "user", "content": content}]});
    check("/v1/responses", body, "/usage/input_tokens").await;
    let block = |data: &str| json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}});
    let linked = json!({"type": "image", "source": {"type": "url", "url": url(OX)}});
    let blocks = chat(json!([block(CAT), text, linked]));
    check("/v1/messages", blocks.clone(), "/usage/input_tokens").await;
    let ollama = json!({"role": "user", "content": "?", "images": [CAT, OX]});
    let body = json!({"model": "script", "stream": false, "messages": [ollama]});
    check("/api/chat", body, "/prompt_eval_count").await;
    let body = json!({"model": "script", "stream": false, "prompt": "?", "images": [CAT, OX]});
    check("/api/generate", body, "/prompt_eval_count").await;
    // Counting looks at headers alone.
    let looked = sight.looked.load(Ordering::Relaxed);
    assert_eq!(looked, 2 * 5);
    check("/v1/messages/count_tokens", blocks, "/input_tokens").await;
    assert_eq!(sight.looked.load(Ordering::Relaxed), looked);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pictures_that_cannot_be_shown_are_refused_by_their_field() {
    let (world, sight) = seeing().await;
    let check = async |path: &str, body: Value, status: u16, wanted: &str| {
        let response = post(world.address, path, &body).await;
        assert_eq!(response.status, status, "{}", response.body);
        assert!(response.body.contains(wanted), "{} lacks {wanted:?}", response.body);
    };
    let chats = "/v1/chat/completions";
    let image = |url: &str| chat(json!([{"type": "image_url", "image_url": {"url": url}}]));
    let at = "messages[0].content[0].image_url.url";
    let fetched = format!("{at}: must be a data URL");
    check(chats, image("http://127.0.0.1/cat.png"), 400, &fetched).await;
    check(chats, image("https://example.com/cat.png"), 400, &fetched).await;
    check(chats, image("file:///etc/passwd"), 400, &fetched).await;
    check(chats, image("data:image/png;base64"), 400, &fetched).await;
    check(chats, image("data:image/png,abc"), 400, "must be a data URL in base64").await;
    check(chats, image("data:image/png;base64,*"), 400, &format!("{at}: is not base64")).await;
    // wrong, then fails.
    check(chats, image(&url("d3Jvbmc=")), 400, "messages[0]: the image is wrong").await;
    check(chats, image(&url("ZmFpbHM=")), 500, "the image could not be computed: no reason").await;
    check(chats, chat(json!([{"type": "image_url"}])), 400, "image_url: is required").await;
    let sound = chat(json!([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]));
    check(chats, sound, 400, "this model reads no sound and no files; it reads text and images").await;
    let film = chat(json!([{"type": "video_url", "video_url": {"url": "data:"}}]));
    check(chats, film, 400, "this model reads no films").await;
    let result = json!({"model": "script", "messages": [{"role": "tool", "tool_call_id": "1",
        "content": [{"type": "image_url", "image_url": {"url": url(CAT)}}]}]});
    check(chats, result, 400, "shows an image in the result of a tool").await;
    let raw = json!({"model": "script", "prompt": "?", "raw": true, "images": [CAT]});
    check("/api/generate", raw, 400, "images: cannot be combined with raw").await;
    let more = json!({"model": "script", "max_tokens": 2, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url(CAT)}}]}], "prompt_logprobs": 1});
    check(chats, more, 400, "prompt_logprobs").await;
    // What does not fit is not looked at.
    let looked = sight.looked.load(Ordering::Relaxed);
    let long = url(&"YWFh".repeat(2000));
    check(chats, image(&long), 400, "context").await;
    assert_eq!(sight.looked.load(Ordering::Relaxed), looked);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forms_are_compiled_before_pictures_are_looked_at() {
    let (world, sight) = seeing().await;
    let chats = "/v1/chat/completions";
    let mut body = chat(json!([{"type": "image_url", "image_url": {"url": url(CAT)}}]));
    // Looking ends the turn in which forms are compiled, so a form that is wrong is known before.
    body["guided_regex"] = json!("(");
    let refused = post(world.address, chats, &body).await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("guided_regex"), "{}", refused.body);
    assert_eq!(sight.looked.load(Ordering::Relaxed), 0);
    body["guided_regex"] = json!("a|b");
    let answered = post(world.address, chats, &body).await;
    assert_eq!(answered.status, 200, "{}", answered.body);
    assert_eq!(sight.looked.load(Ordering::Relaxed), 1);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_that_exceed_the_context_together_are_refused_in_the_words_of_the_api() {
    let (world, sight) = seeing().await;
    let chats = "/v1/chat/completions";
    // Two markers, the images, and the marker of the answer.
    let each = 1500;
    let image = json!({"type": "image_url", "image_url": {"url": url(&"YWFh".repeat(each / 3))}});
    let refused = post(world.address, chats, &chat(json!(vec![image.clone(); 3]))).await;
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert_eq!(refused.json()["error"]["code"], "context_length_exceeded", "{}", refused.body);
    assert!(refused.body.contains(&format!("resulted in {} tokens", 3 * each + 3)), "{}", refused.body);
    // Who counts is told.
    let block = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png",
        "data": "YWFh".repeat(each / 3)}});
    let counted = post(world.address, "/v1/messages/count_tokens", &chat(json!(vec![block; 3]))).await;
    assert_eq!(counted.json()["input_tokens"], 3 * each + 3, "{}", counted.body);
    let small = json!({"type": "image_url", "image_url": {"url": url(OX)}});
    let many = post(world.address, chats, &chat(json!(vec![small; 1001]))).await;
    assert_eq!(many.status, 400, "{}", many.body);
    assert!(
        many.body.contains("messages[0]: the conversation has 1001 images, and may have 1000"),
        "{}",
        many.body
    );
    assert_eq!(sight.looked.load(Ordering::Relaxed), 0);
    world.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_seen_for_a_key_is_kept_for_it_alone_unless_all_share() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    let keys = ["alices-key-0123456789", "bobs-key-0123456789", "alices-key-0123456789"];
    std::fs::write(&file, keys[..2].join("\n")).unwrap();
    let body = chat(json!([{"type": "image_url", "image_url": {"url": url(CAT)}}])).to_string();
    for shares in [false, true] {
        let sight = Arc::new(Bytes::default());
        let shared: Arc<dyn Sight> = Arc::clone(&sight) as _;
        let mut setup = Setup { template: TEMPLATE, sight: Some(shared), ..Setup::default() };
        setup.options.api_key_file = Some(file.clone());
        setup.options.shared_prefixes = shares;
        let world = World::ready(setup).await;
        for key in keys {
            let bearer = format!("Bearer {key}");
            let headers = [("Authorization", bearer.as_str())];
            let request = request("POST", "/v1/chat/completions", &headers, body.as_bytes());
            let answered = raw(world.address, &request).await;
            assert_eq!(answered.status, 200, "{}", answered.body);
        }
        let owners = sight.owners.lock().unwrap().clone();
        if shares {
            assert_eq!(owners, [None, None, None]);
        } else {
            assert!(owners[0].is_some() && owners[1].is_some(), "{owners:?}");
            assert!(owners[0] != owners[1] && owners[0] == owners[2], "{owners:?}");
        }
        world.stopped().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_pictures_become_is_bounded_over_all_requests_under_way() {
    // What three tokens become fills more than half of all room.
    let sight = Arc::new(Bytes { row_bytes: 2 << 10, ..Bytes::default() });
    let shared: Arc<dyn Sight> = Arc::clone(&sight) as _;
    let mut setup = Setup { template: TEMPLATE, sight: Some(shared), ..Setup::default() };
    setup.options.rows_bytes_max = 10 << 10;
    setup.options.prepare_timeout = Duration::from_secs(2);
    let (world, gate) = World::gated(setup).await;
    let body = chat(json!([{"type": "image_url", "image_url": {"url": url(CAT)}}]));
    let address = world.address;
    let ask = |body: &Value| {
        let body = body.clone();
        tokio::spawn(async move { post(address, "/v1/chat/completions", &body).await })
    };
    let first = ask(&body);
    world.until_stepping().await;
    assert_eq!(sight.looked.load(Ordering::Relaxed), 1);
    let refused = ask(&body).await.unwrap();
    assert_eq!(refused.status, 429, "{}", refused.body);
    assert_eq!(refused.json()["error"]["code"], "QUEUE_FULL", "{}", refused.body);
    assert!(refused.body.contains("requests with images"), "{}", refused.body);
    assert_eq!(sight.looked.load(Ordering::Relaxed), 1, "what has no room is not looked at");
    // What shows none needs none; nor does counting.
    let block =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CAT}});
    let counted = post(address, "/v1/messages/count_tokens", &chat(json!([block]))).await;
    assert_eq!(counted.status, 200, "{}", counted.body);
    drop(gate);
    let answered = first.await.unwrap();
    assert_eq!(answered.status, 200, "{}", answered.body);
    // Its room is free again, and there is enough for one that is larger than all room, alone.
    let large = chat(json!(vec![json!({"type": "image_url", "image_url": {"url": url(CAT)}}); 4]));
    for body in [&body, &large, &body] {
        let answered = ask(body).await.unwrap();
        assert_eq!(answered.status, 200, "{}", answered.body);
    }
    world.stopped().await.unwrap();
}
