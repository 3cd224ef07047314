# Evaluates ERB templates of jobs as a Director does: [{name, properties, spec, links, templates: {path: text}}] on standard
# input becomes {name: {path: text}} on standard output. The first mistake ends it with a line on standard error.
require 'erb'
require 'json'
require 'ostruct'
require 'yaml'

module Properties
  NONE = Object.new

  def p(names, default = NONE)
    found = Array(names).map { |name| find(name) }.find { |value| !value.nil? }
    return found unless found.nil?
    raise "there is no property #{Array(names).join(', ')}" if default.equal?(NONE)
    default
  end

  def if_p(*names)
    found = names.map { |name| find(name) }
    return Otherwise.new(self) if found.any?(&:nil?)
    yield(*found)
    Nothing.new
  end

  def find(name) = name.split('.').inject(@raw_properties) { |at, key| at.is_a?(Hash) ? at[key] : nil }
end

# The result of if_p and if_link: a missing value runs the block of else, a present one none.
Otherwise = Struct.new(:job) do
  def else = yield
  def else_if_p(*names, &block) = job.if_p(*names, &block)
  def else_if_link(name, &block) = job.if_link(name, &block)
end

class Nothing
  def else = nil
  def else_if_p(*) = self
  def else_if_link(*) = self
end

class Link
  include Properties
  attr_reader :instances, :properties, :address

  def initialize(given)
    @raw_properties = given['properties'] || {}
    @properties = deep(@raw_properties)
    @instances = (given['instances'] || []).map { |one| deep(one) }
    @address = given['address']
  end
end

class Job
  include Properties
  attr_reader :name, :index, :spec, :properties, :raw_properties

  def initialize(given)
    @raw_properties, @links = given['properties'], given['links']
    @properties, @spec = deep(@raw_properties), deep(given['spec'])
    @name, @index = @spec.name, @spec.index
  end

  def link(name) = Link.new(@links.fetch(name) { raise "there is no link #{name}: consumes of the job names none" })

  def if_link(name)
    return Otherwise.new(self) unless @links.key?(name)
    yield link(name)
    Nothing.new
  end

  def render(path, text)
    template = ERB.new(text, trim_mode: '-')
    template.filename = path
    template.result(binding)
  end
end

def deep(value)
  case value
  when Hash then OpenStruct.new(value.transform_values { |member| deep(member) })
  when Array then value.map { |member| deep(member) }
  else value
  end
end

begin
  found = JSON.parse($stdin.read).to_h do |given|
    $at = given['name']
    [given['name'], given['templates'].to_h { |path, text| [path, Job.new(given).render($at = "#{given['name']}/#{path}", text)] }]
  end
rescue StandardError, ScriptError => e
  line = (e.backtrace || []).grep(/\A#{Regexp.escape($at)}:/).first.to_s[/:(\d+)/]
  abort("#{$at}#{line}: #{e.message.lines.first.to_s.strip}")
end
puts JSON.generate(found)
